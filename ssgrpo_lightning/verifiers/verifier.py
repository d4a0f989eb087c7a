"""The swap point: what a verifier must say."""

from abc import ABC, abstractmethod
from typing import ClassVar

from ssgrpo_lightning.records import Problem, Verdict


class Verifier(ABC):
    """Judges a finished completion, without knowing how it was made."""

    accepts_reference: ClassVar[bool] = True
    """Whether a completion that is the reference answer must be accepted; not so for tests."""

    @abstractmethod
    def __call__(self, completion: str, problem: Problem) -> Verdict:
        """A reward in [0, 1], or None where no verdict can be reached, with a reason.

        An exception raised here becomes a verdict of None; it is counted, and the run goes on.
        """

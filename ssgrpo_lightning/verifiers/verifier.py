"""The swap point: what a verifier must say."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import ClassVar

from ssgrpo_lightning.problems import Problem, Verdict

Pending = Callable[[], list[Verdict]]


class Verifier(ABC):
    """Judges finished completions, without knowing how they were made."""

    accepts_reference: ClassVar[bool] = True
    """Whether a completion that is the reference answer must be accepted; not so where the verdict
    is learnt."""

    @abstractmethod
    def __call__(self, completion: str, problem: Problem) -> Verdict:
        """A reward in [0, 1], or None where no verdict can be reached, with a reason.

        An exception raised here becomes a verdict of None; it is counted, and the run goes on.
        """

    def batch(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Verdicts on many completions, each with the problem that stands at its place.

        For verifiers that judge many at the cost of one. An exception raised here ends the run.
        """
        return [judged(self, text, problem) for text, problem in zip(completions, problems)]

    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        """Start on a batch; the result waits for it.

        For verifiers that judge elsewhere: what is sampled or computed in between costs no time.
        """
        verdicts = self.batch(completions, problems)
        return lambda: verdicts

    def prepare(self) -> None:  # noqa: B027
        """Load what the first verdict needs, so that its time is that of any other."""


class Deferred(Verifier):
    """A verifier whose one method is `begin`."""

    @abstractmethod
    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        """Start on a batch; the result waits for it."""

    def batch(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        return self.begin(completions, problems)()

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        return self.batch([completion], [problem])[0]


def judged(verifier: Verifier, completion: str, problem: Problem) -> Verdict:
    """One verdict and how long it took; None with the reason where the verifier failed."""
    start = perf_counter()
    try:
        verdict = verifier(completion, problem)
    except Exception as error:
        reason = f"{type(verifier).__name__} failed: {repr(error)[:200]}"
        verdict = Verdict(None, reason, killed=isinstance(error, MemoryError))
    return replace(verdict, seconds=verdict.seconds or perf_counter() - start)

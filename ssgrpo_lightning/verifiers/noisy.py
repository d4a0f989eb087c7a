"""A verifier that errs at a known rate."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Deferred, Pending, Verifier


@dataclass(frozen=True)
class Noisy(Deferred):
    """Another verifier whose verdicts are turned round at random: reward r becomes 1 - r.

    A completion of a problem is judged the same every time, as a verifier with blind spots would.
    Evaluate without it: set ``data.evaluation_verifier`` to the verifier inside.
    """

    verifier: Verifier
    """The verifier that judges."""
    flip: float = 0.1
    """Probability that its verdict is turned round; 0.5 leaves no information."""
    seed: int = 0
    """Seed of which verdicts are turned round."""

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 0.5:
            raise ValueError(
                f"Noisy.flip is {self.flip}, must be from 0 to 0.5: above that the verdict means "
                "its opposite"
            )

    def prepare(self) -> None:
        self.verifier.prepare()

    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        pending = self.verifier.begin(completions, problems)
        return lambda: list(map(self._turned, pending(), completions, problems))

    def _turned(self, verdict: Verdict, completion: str, problem: Problem) -> Verdict:
        if verdict.reward is None or self._draw(completion, problem) >= self.flip:
            return verdict
        return replace(verdict, reward=1 - verdict.reward, reason=f"turned round: {verdict.reason}")

    def _draw(self, completion: str, problem: Problem) -> float:
        """A number in [0, 1) that depends on seed, problem and completion alone."""
        key = f"{self.seed} {problem.id} {completion}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big") / 2**56

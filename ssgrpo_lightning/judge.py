"""What turns completions into verdicts and steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.segmenters import Segmenter
from ssgrpo_lightning.verifiers import Verifier


@dataclass(frozen=True)
class Judge:
    """Verifies completions and cuts them into steps."""

    verifier: Verifier
    segmenter: Segmenter

    def begin(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> Callable[[], list[Verdict]]:
        """Start judging; the result waits for the verdicts.

        A reward is None, with the reason, where the verifier itself failed.

        Raises:
            ValueError: On waiting: a reward is outside [0, 1].
        """
        pending = self.verifier.begin(completions, problems)
        return lambda: [self._checked(*pair) for pair in zip(pending(), problems, strict=True)]

    def verdict(self, completion: str, problem: Problem) -> Verdict:
        """The verdict on one completion, as `begin` gives it."""
        return self.begin([completion], [problem])()[0]

    def _checked(self, verdict: Verdict, problem: Problem) -> Verdict:
        if verdict.reward is not None and not 0 <= verdict.reward <= 1:
            raise ValueError(
                f"{type(self.verifier).__name__} gave problem {problem.id} the reward "
                f"{verdict.reward}, must be in [0, 1] or None: scale it"
            )
        return verdict

    def steps(self, pieces: Sequence[str]) -> list[int]:
        """Step of every token.

        Raises:
            ValueError: The segmenter left a token out or jumped over a step.
        """
        steps = self.segmenter(pieces)
        before = [0, *steps[:-1]]
        if len(steps) != len(pieces) or any(s - b not in (0, 1) for b, s in zip(before, steps)):
            raise ValueError(
                f"{type(self.segmenter).__name__} gave {steps} for {len(pieces)} tokens, must give "
                "every token a step that starts at 0 and grows by 0 or 1"
            )
        return steps

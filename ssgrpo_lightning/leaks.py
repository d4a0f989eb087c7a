"""Do held-out problems stand in training, nearly word for word?"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ssgrpo_lightning.functional import near_duplicates
from ssgrpo_lightning.records import Problem


@dataclass(frozen=True)
class LeakCheck:
    """Compares every held-out problem with the training problems, by runs of three words.

    Of a chat the last message is compared. Instructions that most prompts repeat do not count.
    """

    action: Literal["warn", "refuse", "skip"] = "warn"
    """What follows if there are near-duplicates; skip: nobody looks."""
    threshold: float = 0.8
    """Similarity (Jaccard) from which two problems are near-duplicates; 1: the same runs."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"data.leak_check.threshold is {self.threshold}, must be above 0 and at most 1: "
                "0.8 finds a problem with a word changed, 1 the same text alone"
            )

    def __call__(self, split: str, held_out: Sequence[Problem], train: Sequence[Problem]) -> str:
        """What the check found, in a line.

        Raises:
            ValueError: There are near-duplicates and `action` is to refuse them.
        """
        ours, theirs = [asked(p) for p in held_out], [asked(p) for p in train]
        twins = near_duplicates(ours, theirs, self.threshold)
        result = (
            f"leak check: {len(twins)} of {len(ours)} {split} problems are near-duplicates of "
            f"training problems (similarity at least {self.threshold:g})"
        )
        if not twins:
            return result
        shown = sorted(twins, key=lambda twin: -twin.similarity)[:3]
        examples = "; ".join(
            f"{ours[t.row][:120]!r} and {theirs[t.other][:120]!r} ({t.similarity:.2f})"
            for t in shown
        )
        if self.action == "refuse":
            raise ValueError(
                f"{result}: {examples}. Take them out of training, or set "
                "data.leak_check.action to warn"
            )
        warnings.warn(
            f"{result}: {examples}. Take them out of training, or believe {split} figures less",
            stacklevel=2,
        )
        return result


def asked(problem: Problem) -> str:
    """Text of a problem; of a chat the last message, without examples and instructions before."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]

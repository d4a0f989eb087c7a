"""The swap point: what a task must say."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from ssgrpo_lightning.problems import Problem

Split = Literal["train", "validation", "test"]


class Task(ABC):
    """A source of problems, split so that nothing held out is ever trained on."""

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, each with an ``id`` of its own within the split."""

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool] | None:
        """Whether each step of a completion is sound, or None where the task cannot tell.

        For benchmarks and for process-reward baselines only; SS-GRPO never trains on it.
        """
        return None

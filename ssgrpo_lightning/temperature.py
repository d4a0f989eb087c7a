"""How hot the policy samples in each update. One abstract class, then its members.

They hold hyperparameters only: the temperature of the next update is kept and saved by `SSGRPO`.
Rollouts know the temperature that drew them, and the training forward uses the same.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


class Temperature(ABC):
    """Says at what temperature the next update samples."""

    @abstractmethod
    def __call__(
        self, usual: float, update: int, now: float | None = None, distinct: float | None = None
    ) -> float:
        """Temperature of the next update, greater than 0.

        Args:
            usual: ``policy.sampling.temperature``.
            update: Updates made so far.
            now: Temperature of the update that was just made; None before the first.
            distinct: Different completions of a group in that update, over the group size.
        """


@dataclass(frozen=True)
class FixedTemperature(Temperature):
    """``policy.sampling.temperature`` throughout."""

    def __call__(
        self, usual: float, update: int, now: float | None = None, distinct: float | None = None
    ) -> float:
        return usual


@dataclass(frozen=True)
class CoolDown(Temperature):
    """Early exploration: from `start` evenly down to ``policy.sampling.temperature``."""

    start: float = 1.3
    """Temperature of the first update."""
    updates: int = 50
    """Updates after which it has come down."""

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.updates >= 1):
            raise ValueError(
                f"CoolDown has start {self.start} and updates {self.updates}, must be start > 0 "
                "and updates >= 1: 1.3 over the first quarter of a run is a beginning"
            )

    def __call__(
        self, usual: float, update: int, now: float | None = None, distinct: float | None = None
    ) -> float:
        return self.start + (usual - self.start) * min(update / self.updates, 1.0)


@dataclass(frozen=True)
class FollowsDiversity(Temperature):
    """Rises where completions of a group are too alike, falls where they differ more than asked.

    ``T <- clip(T exp(rate (target - distinct)), low, high)``, from ``policy.sampling.temperature``.
    """

    target: float = 0.8
    """Share of the completions of a group that shall differ from each other."""
    low: float = 0.7
    """Least temperature."""
    high: float = 1.3
    """Greatest temperature."""
    rate: float = 0.1
    """Step of the logarithm of the temperature per update and unit of missing share."""

    def __post_init__(self) -> None:
        if not (0 < self.target <= 1 and 0 < self.low <= self.high and self.rate > 0):
            raise ValueError(
                f"FollowsDiversity has target {self.target}, low {self.low}, high {self.high} and "
                f"rate {self.rate}, must be 0 < target <= 1, 0 < low <= high and rate > 0: 0.8, "
                "0.7, 1.3 and 0.1 are a beginning"
            )

    def __call__(
        self, usual: float, update: int, now: float | None = None, distinct: float | None = None
    ) -> float:
        moved = usual
        if now is not None and distinct is not None:
            moved = now * math.exp(self.rate * (self.target - distinct))
        return min(max(moved, self.low), self.high)

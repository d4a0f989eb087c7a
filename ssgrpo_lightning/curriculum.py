"""Curricula: which problems come next, by how often each was solved so far.

One abstract class, then its members, which hold hyperparameters only: what is known of the problems
is a `PassRates`, which the DataModule holds and saves.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PassRates:
    """What is known of each problem of a split, in its order; the same on all ranks.

    Attributes:
        rate: Exponential running mean of the mean reward of its groups; NaN until it has one.
        streak: Its last groups, without a break, whose mean reward was at least that at which the
            curriculum counts a problem as solved.
    """

    rate: Float[Tensor, " problem"]
    streak: Int[Tensor, " problem"]

    @classmethod
    def unknown(cls, count: int) -> "PassRates":
        """Nothing known of `count` problems."""
        return cls(torch.full((count,), float("nan")), torch.zeros(count, dtype=torch.long))

    def metrics(self) -> dict[str, Tensor]:
        """Shares of the problems that were tried, and of these that are never or always solved."""
        tried = ~self.rate.isnan()
        count = tried.sum().clamp(min=1)
        return {
            "curriculum/tried": tried.float().mean(),
            "curriculum/all_zero": (self.rate == 0).sum() / count,
            "curriculum/all_one": (self.rate == 1).sum() / count,
        }


@dataclass(frozen=True)
class Curriculum(ABC):
    """Says which problems a batch is made of, given those whose turn it is."""

    memory: float = 0.5
    """Weight that the running pass rate of a problem keeps when a new group comes in."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise ValueError(
                f"{type(self).__name__}.memory is {self.memory}, must be in [0, 1): 0.5 is usual"
            )

    @property
    def solved_at(self) -> float:
        """Mean reward of a group from which on its problem counts as solved."""
        return 1.0

    @abstractmethod
    def pick(self, due: Sequence[int], known: PassRates, generator: torch.Generator) -> list[int]:
        """Problems of the next batch, as many as are due, none twice.

        Args:
            due: Problems that are next in the random order of the epoch, by their place.
            known: What is known of all problems.
            generator: Randomness; the same on all ranks.
        """

    def follow(
        self, known: PassRates, places: Sequence[int], rewards: Sequence[float]
    ) -> PassRates:
        """What is known after groups of these problems had these mean rewards (NaN: no verdict)."""
        rate, streak = known.rate.clone(), known.streak.clone()
        for place, reward in zip(places, rewards):
            if reward != reward:
                continue
            old = float(rate[place])
            memory = 0.0 if old != old else self.memory
            rate[place] = reward if memory == 0 else memory * old + (1 - memory) * reward
            streak[place] = streak[place] + 1 if reward >= self.solved_at else 0
        return PassRates(rate, streak)


@dataclass(frozen=True)
class Uniform(Curriculum):
    """Every problem once per epoch, in random order."""

    def pick(self, due: Sequence[int], known: PassRates, generator: torch.Generator) -> list[int]:
        return list(due)


@dataclass(frozen=True)
class SolvedRetirement(Curriculum):
    """Solved problems do not come back: their place in the epoch goes to a random other one.

    Where fewer problems are left than a batch needs, retired ones fill it.
    """

    threshold: float = 1.0
    """Mean reward of a group from which on its problem is solved."""
    patience: int = 2
    """Groups in a row that must be solved before a problem retires."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.threshold <= 1 and self.patience >= 1):
            raise ValueError(
                f"SolvedRetirement has threshold {self.threshold} and patience {self.patience}, "
                "must be 0 < threshold <= 1 and patience >= 1: 1.0 and 2 are usual"
            )

    @property
    def solved_at(self) -> float:
        return self.threshold

    def pick(self, due: Sequence[int], known: PassRates, generator: torch.Generator) -> list[int]:
        active = known.streak < self.patience
        stay = [i for i in due if active[i]]
        others = _without(active, due)
        drawn = torch.randperm(len(others), generator=generator)[: len(due) - len(stay)]
        chosen = stay + others[drawn].tolist()
        retired = [i for i in due if not active[i]]
        return chosen + retired[: len(due) - len(chosen)]


@dataclass(frozen=True)
class DifficultyBuckets(Curriculum):
    """A share of every batch is of problems that are sometimes solved; the rest follow the epoch.

    Within the band a problem is drawn in proportion to ``p (1 - p)``, the variance of its outcome,
    which is what a group can learn from. The rest of the batch goes on through all problems, so
    that every pass rate is measured again. As long as the band holds too few, they take its places.
    """

    low: float = 0.2
    """Running pass rate from which on a problem is in the band."""
    high: float = 0.8
    """Running pass rate up to which it is."""
    share: float = 0.5
    """Share of a batch that comes from the band."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.low < self.high < 1 and 0 <= self.share <= 1):
            raise ValueError(
                f"DifficultyBuckets has low {self.low}, high {self.high} and share {self.share}, "
                "must be 0 < low < high < 1 and 0 <= share <= 1: 0.2, 0.8 and 0.5 are usual"
            )

    def pick(self, due: Sequence[int], known: PassRates, generator: torch.Generator) -> list[int]:
        band = ((known.rate >= self.low) & (known.rate <= self.high)).nonzero()[:, 0]
        count = min(round(self.share * len(due)), len(band))
        drawn: list[int] = []
        if count:
            rate = known.rate[band]
            drawn = band[torch.multinomial(rate * (1 - rate), count, generator=generator)].tolist()
        taken = set(drawn)
        return drawn + [i for i in due if i not in taken][: len(due) - count]


def _without(mask: Bool[Tensor, " problem"], places: Sequence[int]) -> Int[Tensor, " rest"]:
    """Problems of the mask but for some."""
    rest = mask.clone()
    rest[torch.tensor(list(places), dtype=torch.long)] = False
    return rest.nonzero()[:, 0]

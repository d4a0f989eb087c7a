"""What rollouts lose before advantages are made: reward, for length, or their place in the loss.

One abstract class, then its members. They act in the order in which they are listed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional import group_sum, mixed_groups, overlong_penalties
from ssgrpo_lightning.records import Rollouts


class Shaping(ABC):
    """Adds to `Rollouts.penalties` or to `Rollouts.masked`; never changes the reward itself."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with more penalties or a wider mask."""


def penalised(rollouts: Rollouts, penalties: Float[Tensor, " rollout"]) -> Rollouts:
    """The rollouts with further penalties; NaN takes a rollout out of its group's statistics."""
    before = 0.0 if rollouts.penalties is None else rollouts.penalties
    return replace(rollouts, penalties=before + penalties)


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """Soft overlong punishment, DAPO (2503.14476) eq. 13: off the reward comes a ramp over length.

    0 up to ``max_tokens - buffer`` sampled tokens, `weight` from `max_tokens` on, even in between.
    """

    max_tokens: int
    """Length from which the whole weight is taken off: the token budget of a completion."""
    buffer: int
    """Tokens before that over which the penalty grows."""
    weight: float = 1.0
    """Greatest penalty; a success is worth 1."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ValueError(
                f"SoftOverlong has buffer {self.buffer} and max_tokens {self.max_tokens}, must be "
                "0 < buffer <= max_tokens: a fifth of the token budget is usual"
            )
        if self.weight <= 0:
            raise ValueError(
                f"SoftOverlong.weight is {self.weight}, must be greater than 0: 1 is usual"
            )

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        lengths = rollouts.completion_lengths
        ramp = overlong_penalties(lengths.float(), self.max_tokens, self.buffer)
        return penalised(rollouts, self.weight * ramp)


@dataclass(frozen=True)
class MaskTruncated(Shaping):
    """Completions that the token budget ended teach nothing: they leave loss and divisor.

    DAPO's overlong filtering (2503.14476, section 3.4); TRL's ``mask_truncated_completions``.
    """

    in_statistics: bool = True
    """Whether they stay in the mean and deviation of their group, as in TRL: the others are then
    compared with them. Without, the group is as if they had not been sampled."""

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        if not self.in_statistics:
            gone = torch.where(rollouts.truncated, float("nan"), 0.0)
            rollouts = penalised(rollouts, gone)
        return _masked(rollouts, rollouts.truncated)


@dataclass(frozen=True)
class MaskDead(Shaping):
    """Groups of equal returns leave the divisor of the loss, and its KL term.

    Their advantage is 0 anyway. Without this they count in the divisor: the fewer groups teach
    something, the smaller the update, as in TRL. With it the update is of one size whatever their
    number, as in DAPO, which drops them.
    """

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        mixed = mixed_groups(rollouts.returns, rollouts.group).float()
        return _masked(rollouts, group_sum(mixed, rollouts.group) == 0)


def _masked(rollouts: Rollouts, more: Tensor) -> Rollouts:
    return replace(rollouts, masked=more if rollouts.masked is None else rollouts.masked | more)

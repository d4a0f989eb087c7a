"""Rewards of a group to the advantage of each rollout. One abstract class, then its members."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional import group_advantages
from ssgrpo_lightning.records import Rollouts


class Advantage(ABC):
    """Says how much better or worse each rollout did than its group."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, " rollout"]:
        """Advantage of each rollout; exactly 0 without a verdict and in groups of equal returns.

        It reads `Rollouts.returns`, the outcome less what was taken off for length or KL.
        """


@dataclass(frozen=True)
class GroupRelative(Advantage):
    """Return less the group's mean, over a deviation: ``A_i = (R_i - m) / (s + 1e-4)``.

    DeepSeekMath (2402.03300) section 4.1.2; without a deviation, Dr. GRPO (2503.20783).
    """

    scale: Literal["group", "batch", "none"] = "group"
    """Deviation s that divides: of the group, of the batch, or none (s = 1 without the 1e-4)."""

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, " rollout"]:
        return group_advantages(rollouts.returns, rollouts.group, self.scale)

"""Rewards of a group to the advantage of each rollout. One abstract class, then its members."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional import (
    group_advantages,
    group_copies,
    mean_divided_advantages,
    pass_at_k_advantages,
    whitened_advantages,
)
from ssgrpo_lightning.records import Outcomes, Rollouts

PerRollout = Float[Tensor, " rollout"]


def outcomes_of(rollouts: Rollouts) -> Outcomes:
    """What an advantage may look at."""
    return Outcomes(
        returns=rollouts.returns,
        rewards=rollouts.rewards,
        group=rollouts.group,
        copies=group_copies(rollouts.tokens, rollouts.sampled, rollouts.group)[0],
        parts=rollouts.parts,
    )


class Advantage(ABC):
    """Says how much better or worse each rollout did than its group."""

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> PerRollout:
        """Advantage of each rollout; exactly 0 without a return and in groups of equal returns.

        The outcomes are those of all ranks, so that statistics over the batch are the same however
        it is split. It reads `Outcomes.returns`, the reward less what was taken off for length or
        KL, and nothing that a rollout's own number of steps or tokens could move.
        """


@dataclass(frozen=True)
class GroupRelative(Advantage):
    """Return less the group's mean, over a deviation: ``A_i = (R_i - m) / (s + 1e-4)``.

    DeepSeekMath (2402.03300) section 4.1.2; without a deviation, Dr. GRPO (2503.20783); that and
    `leave_one_out`, RLOO (2402.14740). As TRL's ``scale_rewards``, but that the deviation is
    floored at 1e-3 and equal returns give exactly 0. Several weighted rewards: sum them in the
    verifier.
    """

    scale: Literal["group", "batch", "none"] = "group"
    """Deviation s that divides: of the group, of the batch, or none (s = 1 without the 1e-4)."""
    leave_one_out: bool = False
    """Take m over the other rollouts of the group; s is still that of all of them."""

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        return group_advantages(outcomes.returns, outcomes.group, self.scale, self.leave_one_out)


@dataclass(frozen=True)
class MaxRl(Advantage):
    """Return less the group's mean, over the group's mean outcome: ``A_i = (R_i - m) / m``.

    Maximum-likelihood RL (MaxRL, 2602.02710): climbs the log of the success rate, so that problems
    that are rarely solved count for more. A group without any success gets 0.
    """

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        return mean_divided_advantages(outcomes.returns, outcomes.rewards, outcomes.group)


@dataclass(frozen=True)
class PassAtK(Advantage):
    """What a rollout adds to the best of k of its group, ``E_S[max_{S + i} R - max_S R]``.

    Climbs pass@k rather than pass@1, so that no way to solve a problem is given up for the surest.
    It is the leave-one-out advantage of 2503.19595, averaged over all sets of k rollouts of the
    group as in 2505.15201; with k the group size, verl's ``grpo_passk`` before it divides by a
    deviation. Not the standardised one of 2508.10751. Never negative: failures are not pushed down.
    """

    k: int = 4
    """Attempts that the best is taken of; at least 2, and no more than the group size."""

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ValueError(
                f"PassAtK.k is {self.k}, must be at least 2: for pass@1 use GroupRelative"
            )

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        return pass_at_k_advantages(outcomes.returns, outcomes.group, self.k)


@dataclass(frozen=True)
class BatchWhitened(Advantage):
    """Return less the group's mean, over the deviation of that difference in the whole batch.

    REINFORCE++-baseline (2501.03262): ``A_i = (R_i - m) / (std_batch(R - m) + 1e-4)``. Where
    `GroupRelative` with scale batch divides by the deviation of the returns themselves, which easy
    and hard problems widen, this one divides by what is left of them within groups.
    """

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        centred = group_advantages(outcomes.returns, outcomes.group, "none")
        return whitened_advantages(centred, ~outcomes.returns.isnan())


@dataclass(frozen=True)
class NormaliseThenSum(Advantage):
    """Several rewards, each normalised in its group, then weighted, summed, scaled by the batch.

    GDPO (2601.05242), TRL's ``normalize_then_sum``: ``A_i = s_i / (std_batch(s) + 1e-4)`` with
    ``s_i = sum_k w_k (R_ik - m_k) / (std_k + 1e-4)``. No part drowns for being of a smaller scale.
    A part that is equal throughout a group adds exactly 0 there. Penalties are taken off s as they
    are, less their group's mean.
    """

    weights: tuple[float, ...] | None = None
    """Weight of each part of the reward, in the verifier's order; null: 1 each."""

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        parts, group = outcomes.parts, outcomes.group
        count = 0 if parts is None else parts.shape[1]
        if parts is None or (self.weights is not None and len(self.weights) != count):
            raise ValueError(
                f"model.advantage is NormaliseThenSum with weights {self.weights}, but verdicts "
                f"have {count} parts: use a verifier that gives several, and one weight for each"
            )
        known = ~outcomes.returns.isnan()
        parts = torch.where(known[:, None], parts, float("nan"))
        weights = self.weights or (1.0,) * count
        summed = -group_advantages(outcomes.rewards - outcomes.returns, group, "none")
        for weight, part in zip(weights, parts.unbind(1)):
            summed = summed + weight * group_advantages(part, group)
        return whitened_advantages(summed, known)


@dataclass(frozen=True)
class WeighDuplicates(Advantage):
    """Another advantage, in which a completion that stands n times in its group counts 1/n each.

    So the group pulls once for every different completion, not once for every draw. The statistics
    of the group are still those of all its rollouts.
    """

    advantage: Advantage = field(default_factory=GroupRelative)
    """How rewards become advantages before that."""

    def __call__(self, outcomes: Outcomes) -> PerRollout:
        return self.advantage(outcomes) / outcomes.copies

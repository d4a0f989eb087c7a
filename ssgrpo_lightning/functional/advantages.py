"""Rewards of a group to its advantages."""

import math
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from ssgrpo_lightning.functional.shapes import Groups, PerRollout

STD_FLOOR, STD_EPSILON = 1e-3, 1e-4


def group_sum(x: PerRollout, group: Groups) -> PerRollout:
    """Sum over each rollout's group, ``sum_{j in group(i)} x_j``.

    >>> group_sum(torch.tensor([1., 2., 5.]), torch.tensor([0, 0, 1]))
    tensor([3., 3., 5.])
    """
    sums = x.new_zeros(int(group.max()) + 1 if len(group) else 0)
    return sums.index_add(0, group, x)[group]


def group_mean(rewards: PerRollout, group: Groups) -> PerRollout:
    """Mean reward of each rollout's group over the rollouts that have one (NaN = no verdict).

    >>> group_mean(torch.tensor([1., 0., float("nan"), .5]), torch.tensor([0, 0, 0, 1]))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    valid = (~rewards.isnan()).to(rewards.dtype)
    total = group_sum(rewards.nan_to_num(), group)
    return total / group_sum(valid, group).clamp(min=1)


def mixed_groups(rewards: PerRollout, group: Groups) -> Bool[Tensor, " rollout"]:
    """True for rollouts with a verdict whose group holds two different rewards.

    >>> mixed_groups(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])
    """
    low, high = _group_range(rewards, group)
    return (high > low) & ~rewards.isnan()


def _group_range(rewards: PerRollout, group: Groups) -> tuple[PerRollout, PerRollout]:
    """Least and greatest reward of each rollout's group, over those that have one."""
    n, inf = int(group.max()) + 1 if len(group) else 0, math.inf
    low = rewards.new_full((n,), inf).scatter_reduce(0, group, rewards.nan_to_num(inf), "amin")
    high = rewards.new_full((n,), -inf).scatter_reduce(0, group, rewards.nan_to_num(-inf), "amax")
    return low[group], high[group]


def relative_rewards(rewards: PerRollout, group: Groups) -> PerRollout:
    """Min-max normalised reward within the group; NaN where all are equal or none is known.

    >>> relative_rewards(torch.tensor([.2, .4, .6]), torch.tensor([0, 0, 0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    low, high = _group_range(rewards, group)
    return (rewards - low) / (high - low)


def group_std(rewards: PerRollout, group: Groups) -> PerRollout:
    """Unbiased standard deviation of each rollout's group, two-pass; 0 for fewer than two verdicts.

    >>> group_std(torch.tensor([1., 0., 0., 0.]), torch.zeros(4, dtype=torch.long))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    valid = (~rewards.isnan()).to(rewards.dtype)
    squared = (rewards - group_mean(rewards, group)).nan_to_num().square()
    return (group_sum(squared, group) / (group_sum(valid, group) - 1).clamp(min=1)).sqrt()


def group_deviation(rewards: PerRollout, group: Groups) -> PerRollout:
    """What divides an advantage: `group_std` floored at 1e-3, plus 1e-4.

    >>> group_deviation(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]))
    tensor([0.5001, 0.5001, 0.5001, 0.5001])
    """
    return group_std(rewards, group).clamp(min=STD_FLOOR) + STD_EPSILON


def group_advantages(
    rewards: PerRollout, group: Groups, scale: Literal["group", "batch", "none"] = "group"
) -> PerRollout:
    """Outcome advantage ``A_i = (R_i - m) / (s + 1e-4)``, DeepSeekMath (2402.03300) section 4.1.2.

    `scale` chooses the deviation s: of the group, of the batch, or none (Dr. GRPO, 2503.20783).
    It is unbiased (K - 1) and floored at 1e-3. Groups of equal rewards and rollouts without a
    verdict get exactly 0.

    >>> group_advantages(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    deviation = {
        "group": lambda: group_deviation(rewards, group),
        "batch": lambda: group_deviation(rewards, torch.zeros_like(group)),
        "none": lambda: torch.ones_like(rewards),
    }[scale]()
    centred = rewards - group_mean(rewards, group)
    return torch.where(mixed_groups(rewards, group), centred / deviation, 0.0)


def clipped_baseline(rewards: PerRollout, group: Groups) -> PerRollout:
    """Group mean kept off 0 and 1 by half a rollout, ``clip(m, 1/2K, 1 - 1/2K)``: V_0 of a rollout.

    >>> clipped_baseline(torch.tensor([1., 1.]), torch.tensor([0, 0]))
    tensor([0.7500, 0.7500])
    """
    half = 0.5 / group_sum(torch.ones_like(rewards), group)
    return torch.minimum(torch.maximum(group_mean(rewards, group), half), 1 - half)


def others_mean(rewards: PerRollout, group: Groups) -> PerRollout:
    """Mean reward of the other rollouts of the group, drawn to 1/2 by one more: in (0, 1).

    >>> others_mean(torch.tensor([1., 0., 0.]), torch.tensor([0, 0, 0]))
    tensor([0.1667, 0.5000, 0.5000])
    """
    known, won = (~rewards.isnan()).to(rewards.dtype), rewards.nan_to_num()
    others = group_sum(known, group) - known
    return (group_sum(won, group) - won + 0.5) / (others + 1)

"""Rewards of a group to its advantages."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ssgrpo_lightning.functional.shapes import Groups, PerRollout, Steps
from ssgrpo_lightning.functional.steps import step_fingerprints

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
    rewards: PerRollout,
    group: Groups,
    scale: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
) -> PerRollout:
    """Outcome advantage ``A_i = (R_i - m) / (s + 1e-4)``, DeepSeekMath (2402.03300) section 4.1.2.

    `scale` chooses the deviation s: of the group, of the batch, or none (Dr. GRPO, 2503.20783).
    It is unbiased (K - 1) and floored at 1e-3, and always that of all rollouts. With
    `leave_one_out`, m is the mean of the *other* rollouts of the group (RLOO, 2402.14740), which
    makes ``K / (K - 1)`` of the difference. Groups of equal rewards and rollouts without a verdict
    get exactly 0.

    >>> group_advantages(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    >>> one = torch.zeros(4, dtype=torch.long)
    >>> group_advantages(torch.tensor([1., 0., 0., 0.]), one, "none", leave_one_out=True)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    deviation = {
        "group": lambda: group_deviation(rewards, group),
        "batch": lambda: group_deviation(rewards, torch.zeros_like(group)),
        "none": lambda: torch.ones_like(rewards),
    }[scale]()
    centred = rewards - group_mean(rewards, group)
    if leave_one_out:
        known = group_sum((~rewards.isnan()).to(rewards.dtype), group)
        centred = centred * known / (known - 1).clamp(min=1)
    return torch.where(mixed_groups(rewards, group), centred / deviation, 0.0)


def mean_divided_advantages(returns: PerRollout, rewards: PerRollout, group: Groups) -> PerRollout:
    """``A_i = (R_i - m) / m`` with the mean outcome m of the group; 0 in a group without success.

    Source: maximum-likelihood RL (MaxRL, 2602.02710): its expectation is the gradient of the
    log-likelihood of success, truncated after as many terms as the group has rollouts, where the
    undivided difference is that of the success rate.

    >>> r = torch.tensor([1., 0., 0., 0.])
    >>> mean_divided_advantages(r, r, torch.zeros(4, dtype=torch.long))
    tensor([ 3., -1., -1., -1.])
    """
    mean = group_mean(rewards, group)
    learns = mixed_groups(returns, group) & (mean > 0)
    centred = returns - group_mean(returns, group)
    return torch.where(learns, centred / mean.clamp(min=STD_FLOOR), 0.0)


def pass_at_k_advantages(rewards: PerRollout, group: Groups, k: int) -> PerRollout:
    """What a rollout adds to the best of k: ``A_i = E_S[max_{S + i} R - max_S R]``, never negative.

    S runs over all subsets of k - 1 others of the group. With the others sorted upwards the best of
    S is the j-th (from 0) in ``C(j, k - 2) / C(n - 1, k - 1)`` of them, so the mean is exact. Of
    binary rewards a success gets the chance that no other of its k succeeds, a failure 0; k = n
    gives the difference between the best and the second best to the best alone. In a group with
    fewer than k verdicts, k is their number.

    Sources: leave-one-out baseline of the best of n (2503.19595), its mean over subsets
    (2505.15201).

    >>> one = torch.zeros(4, dtype=torch.long)
    >>> pass_at_k_advantages(torch.tensor([1., 1., 0., 0.]), one, 2)
    tensor([0.6667, 0.6667, 0.0000, 0.0000])
    >>> pass_at_k_advantages(torch.tensor([1., .75, 0., 0.]), one, 4)
    tensor([0.2500, 0.0000, 0.0000, 0.0000])
    """
    known, value = ~rewards.isnan(), rewards.nan_to_num().double()
    place = torch.arange(len(rewards), device=rewards.device)
    same = (group[:, None] == group) & known[:, None] & known
    earlier = (value[:, None] == value) & (place[:, None] > place)
    below = same & ((value[:, None] > value) | earlier)
    rank, others = below.sum(1), same.sum(1) - 1
    size = (others + 1).clamp(max=k)
    # A row is the rollout, a column what is best of the rest.
    log = _log_choose(rank[None, :], size[:, None] - 2) - _log_choose(others, size - 1)[:, None]
    gain = torch.where(below, (value[:, None] - value) * log.exp(), 0.0).sum(1)
    return torch.where(mixed_groups(rewards, group), gain, 0.0).to(rewards.dtype)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Logarithm of the binomial coefficients ``C(n, k)``; -inf outside of 0 <= k <= n."""
    n, k = torch.broadcast_tensors(n.double(), k.double())
    inside = (k >= 0) & (k <= n)
    n, k = torch.where(inside, n, 0.0), torch.where(inside, k, 0.0)
    log = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.where(inside, log, -math.inf)


def whitened_advantages(advantages: PerRollout, learns: Bool[Tensor, " rollout"]) -> PerRollout:
    """Divide advantages of mean 0 by their deviation over the batch; exactly 0 stays so.

    The deviation is that of all rollouts with a verdict (`learns`), dead groups included,
    unbiased, floored at 1e-3, plus 1e-4.

    >>> whitened_advantages(torch.tensor([1., -1., 0.]), torch.tensor([True, True, True]))
    tensor([ 0.9999, -0.9999,  0.0000])
    """
    square = torch.where(learns, advantages, 0.0).square().sum()
    deviation = (square / (learns.sum() - 1).clamp(min=1)).sqrt()
    return torch.where(learns, advantages / (deviation.clamp(min=STD_FLOOR) + STD_EPSILON), 0.0)


def overlong_penalties(lengths: PerRollout, max_tokens: int, buffer: int) -> PerRollout:
    """Soft overlong punishment, DAPO (2503.14476) eq. 13 with its sign turned.

    ``clip((|y| - (L_max - L_buffer)) / L_buffer, 0, 1)``.

    >>> overlong_penalties(torch.tensor([10., 16., 18., 20., 30.]), 20, 4)
    tensor([0.0000, 0.0000, 0.5000, 1.0000, 1.0000])
    """
    return ((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def group_copies(
    tokens: Steps, sampled: Bool[Tensor, "rollout token"], group: Groups
) -> tuple[Int[Tensor, " rollout"], Bool[Tensor, " rollout"]]:
    """Which rollouts of a group have the same completion, token by token.

    Returns:
        How many of its group have it, at least 1; True where an earlier one has it already.

    >>> tokens, sampled = torch.tensor([[5, 7], [5, 7], [5, 8]]), torch.ones(3, 2).bool()
    >>> group_copies(tokens, sampled, torch.zeros(3, dtype=torch.long))
    (tensor([2, 2, 1]), tensor([False,  True, False]))
    """
    text = step_fingerprints(tokens, torch.where(sampled, 0, -1), 1)[:, 0]
    kinds = torch.stack([group, text], 1)
    _, same, often = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    place = torch.arange(len(group), device=group.device)
    first = place.new_full((len(often),), len(group)).scatter_reduce(0, same, place, "amin")
    return often[same], place != first[same]


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

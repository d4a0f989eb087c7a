"""All tensor maths of Step-Sparse GRPO, in the order in which one update needs it.

Every function is pure. The axes are those of `records`. Notation: problem P, rollouts i of a group
of K, reward R_i, group mean m, group deviation s, advantage A_i; rollout i has steps t, prefix
s_<=t; value V_t, weight w_t, estimator logit z_t.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

PerRollout = Float[Tensor, " rollout"]
PerStep = Float[Tensor, "rollout step"]
PerToken = Float[Tensor, "rollout token"]
Steps = Int[Tensor, "rollout token"]
Groups = Int[Tensor, " rollout"]
StepMask = Bool[Tensor, "rollout step"]

STD_FLOOR, STD_EPSILON = 1e-3, 1e-4

# --- group advantage -------------------------------------------------------------------------


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
    everyone = torch.zeros_like(group)
    deviation = {
        "group": lambda: group_std(rewards, group).clamp(min=STD_FLOOR) + STD_EPSILON,
        "batch": lambda: group_std(rewards, everyone).clamp(min=STD_FLOOR) + STD_EPSILON,
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


# --- steps and tokens ------------------------------------------------------------------------


def step_lengths(step: Steps, steps: int) -> Int[Tensor, "rollout step"]:
    """Tokens of each step; `step` is -1 where a token belongs to none.

    >>> step_lengths(torch.tensor([[-1, 0, 0, 1]]), 3)
    tensor([[2, 1, 0]])
    """
    counts = torch.zeros(len(step), steps + 1, dtype=torch.long, device=step.device)
    return counts.scatter_add(1, step + 1, torch.ones_like(step))[:, 1:]


def pool_steps(
    x: PerToken, step: Steps, steps: int, how: Literal["sum", "mean", "amin", "amax"]
) -> PerStep:
    """Pool a per-token quantity over the tokens of each step; 0 for steps that do not exist.

    >>> pool_steps(torch.tensor([[9., 1., 3., 5.]]), torch.tensor([[-1, 0, 0, 1]]), 2, "mean")
    tensor([[2., 5.]])
    """
    pooled = x.new_zeros(len(x), steps + 1)
    return pooled.scatter_reduce(1, step + 1, x, how, include_self=False)[:, 1:]


def spread_steps(x: PerStep, step: Steps) -> PerToken:
    """Give every token the quantity of its step; 0 where a token belongs to none.

    >>> spread_steps(torch.tensor([[2., 5.]]), torch.tensor([[-1, 0, 0, 1]]))
    tensor([[0., 2., 2., 5.]])
    """
    return torch.where(step >= 0, x.gather(1, step.clamp(min=0)), 0.0)


# --- credit ----------------------------------------------------------------------------------


def mean_one(weights: PerStep, lengths: Int[Tensor, "rollout step"]) -> PerStep:
    """Divide weights by their token-weighted mean over the rollout; all-zero weights become 1.

    Keeps the size of the update whatever the weights, so that the balance against KL and entropy
    terms does not drift with them.

    >>> mean_one(torch.tensor([[1., 3.], [0., 0.]]), torch.tensor([[1, 1], [2, 2]]))
    tensor([[0.5000, 1.5000],
            [1.0000, 1.0000]])
    """
    total = (weights * lengths).sum(1, keepdim=True)
    mean = total / lengths.sum(1, keepdim=True).clamp(min=1)
    return torch.where(total > 0, weights / mean.clamp(min=1e-12), 1.0)


def sign_aware(scores: PerStep, advantages: PerRollout) -> PerStep:
    """Blame the unsound steps of a failure: score where A > 0, 1 - score where A < 0.

    Source: OREAL (2502.06781) eq. 10.

    >>> sign_aware(torch.tensor([[.9, .2], [.9, .2]]), torch.tensor([1., -1.]))
    tensor([[0.9000, 0.2000],
            [0.1000, 0.8000]])
    """
    return torch.where(advantages[:, None] < 0, 1 - scores, scores)


def value_gains(values: PerStep, baseline: PerRollout, mask: StepMask) -> PerStep:
    """What each step did to the expected reward, ``D_t = V_t - V_{t-1}`` with ``V_0`` the baseline.

    Source: VinePPO (2410.01679) eq. 5 without the immediate reward; PAV (2410.08146).

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> value_gains(torch.tensor([[.75, .25]]), torch.tensor([.5]), m)
    tensor([[ 0.2500, -0.5000]])
    """
    before = torch.cat([baseline[:, None], values[:, :-1]], 1)
    return torch.where(mask, values - before, 0.0)


def gain_weights(
    gains: PerStep, advantages: PerRollout, k: float, floor: float, w_max: float
) -> PerStep:
    """Weight that grows with a gain in successes and a loss in failures, before the mean-1 step.

    ``w_t = clip(1 + k sign(A_i) D_t, floor, w_max)``; k = 0 is GRPO. Source: the recipe's own shape
    with OREAL's sign (2502.06781) and a difference for a level.

    >>> gain_weights(torch.tensor([[.25, -.5]]), torch.tensor([-1.]), k=4, floor=.1, w_max=4)
    tensor([[0.1000, 3.0000]])
    """
    return (1 + k * advantages.sign()[:, None] * gains).clamp(floor, w_max)


def gated(weights: PerStep, gate: float) -> PerStep:
    """Blend weights with 1: ``w <- 1 + g (w - 1)``; g = 0 gives exactly 1, plain GRPO.

    >>> gated(torch.tensor([[3., .5]]), .5)
    tensor([[2.0000, 0.7500]])
    """
    return 1 + gate * (weights - 1)


def window_mean(
    weights: PerStep, lengths: Int[Tensor, "rollout step"], window: int, longer_than: int
) -> PerStep:
    """In rollouts longer than `longer_than` tokens, average weights within windows of tokens.

    A step belongs to the window in which it starts; all steps of a window get their token-weighted
    mean. Shorter rollouts keep their weights. Source: the published recipe (windows of 512 over
    5,000 tokens).

    >>> w, n = torch.tensor([[1., 3., 5.]]), torch.tensor([[2, 2, 4]])
    >>> window_mean(w, n, window=4, longer_than=7)
    tensor([[2., 2., 5.]])
    """
    if not bool((lengths.sum(1) > longer_than).any()):
        return weights
    index = (lengths.cumsum(1) - lengths) // window
    shape = len(weights), int(index.max()) + 1
    tokens = weights.new_zeros(shape).scatter_add(1, index, lengths.to(weights.dtype))
    mass = weights.new_zeros(shape).scatter_add(1, index, weights * lengths)
    mean = (mass / tokens.clamp(min=1)).gather(1, index)
    long = lengths.sum(1, keepdim=True) > longer_than
    return torch.where(long & (lengths > 0), mean, weights)


# --- policy loss -----------------------------------------------------------------------------


def clipped_surrogate(
    logprobs: PerToken, old: PerToken, advantages: PerToken, low: float, high: float
) -> PerToken:
    """Clipped surrogate ``-min(r A, clip(r, 1 - low, 1 + high) A)``, PPO (1707.06347) eq. 7.

    On-policy the ratio is 1 and the loss value is minus the mean advantage, about 0: only its
    gradient tells.

    >>> lp, old = torch.tensor([[0.5]]), torch.tensor([[0.0]])
    >>> clipped_surrogate(lp, old, torch.tensor([[1.0]]), .2, .2)
    tensor([[-1.2000]])
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Estimate of KL(policy || reference) per token, ``e^d - d - 1`` with ``d = ref - logprob``.

    Source: DeepSeekMath (2402.03300) eq. 4 ("k3"); never negative, in nats.

    >>> kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]))
    tensor([[0.]])
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


# --- estimator objectives: per rollout, 0 for rollouts outside mixed groups --------------------


def mean_steps(x: PerStep, mask: StepMask) -> PerRollout:
    """Mean over the steps a rollout has; 0 where it has none.

    >>> mean_steps(torch.tensor([[1., 3., 9.]]), torch.tensor([[True, True, False]]))
    tensor([2.])
    """
    return torch.where(mask, x, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def noisy_and_logprob(logits: PerStep, mask: StepMask) -> PerRollout:
    """Log-probability of success if every step must be sound, ``log P = sum_t log sigmoid(z_t)``.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> noisy_and_logprob(torch.zeros(1, 2), m).exp()
    tensor([0.2500])
    """
    return torch.where(mask, F.logsigmoid(logits), 0.0).sum(1)


def outcome_loss(logprob: PerRollout, rewards: PerRollout) -> PerRollout:
    """Cross-entropy of a success probability P to the outcome, ``-R log P - (1 - R) log(1 - P)``.

    >>> outcome_loss(torch.tensor([.25]).log(), torch.tensor([0.]))
    tensor([0.2877])
    """
    logprob = logprob.clamp(max=-1e-6)
    return -(rewards * logprob + (1 - rewards) * torch.log(-torch.expm1(logprob)))


def prefix_loss(
    logits: PerStep, mask: StepMask, rewards: PerRollout, baseline: PerRollout
) -> PerRollout:
    """Cross-entropy of every prefix value ``V_t = sigmoid(logit(m) + z_t)`` to the outcome.

    The offset leaves only differences within a group to be learnt. Source: token-level verifiers
    (Cobbe et al., 2110.14168).

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> prefix_loss(torch.zeros(1, 1), m, torch.tensor([1.]), torch.tensor([.5]))
    tensor([0.6931])
    """
    z = torch.logit(baseline)[:, None] + logits
    target = rewards[:, None].expand_as(z)
    return mean_steps(F.binary_cross_entropy_with_logits(z, target, reduction="none"), mask)


def pairwise_loss(z: PerRollout, rewards: PerRollout, group: Groups, margin: float) -> PerRollout:
    """Mean over a rollout's better or worse group members of ``softplus(margin - (z_+ - z_-))``.

    Source: Bradley-Terry within the group, as iStar (2509.19199) and PQM (2410.11287).

    >>> z, r = torch.tensor([2., 0.]), torch.tensor([1., 0.])
    >>> pairwise_loss(z, r, torch.tensor([0, 0]), margin=2.)
    tensor([0.6931, 0.6931])
    """
    same = group[:, None] == group[None]
    order = torch.where(same, rewards[:, None] - rewards[None], 0.0).nan_to_num().sign()
    loss = F.softplus(margin - order * (z[:, None] - z[None])) * order.abs()
    return loss.sum(1) / order.abs().sum(1).clamp(min=1)

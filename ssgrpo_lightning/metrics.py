"""What is logged of an update: pairs (sum, count), so that means over ranks are means of sums."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import spearman_corrcoef

from ssgrpo_lightning.functional import (
    group_mean,
    group_std,
    group_sum,
    mixed_groups,
    pool_steps,
    spread_steps,
    step_fingerprints,
    step_lengths,
)
from ssgrpo_lightning.records import Rollouts, StepScores

Sums = dict[str, tuple[Tensor, Tensor]]

UNIFORM_OVER, COLLAPSED_UNDER = 0.99, 0.5
NEAR_ZERO = 1e-6
SOUND_FROM = 0.5
TOP_TEXTS = 10


def mean_of(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum and count of the finite entries of `x` where `mask` holds.

    >>> mean_of(torch.tensor([1., float("nan"), 3.]))
    (tensor(4.), tensor(2.))
    """
    x = x.float()
    keep = ~x.isnan() if mask is None else mask & ~x.isnan()
    return torch.where(keep, x, 0.0).sum(), keep.sum().float()


def ranking_accuracy(
    z: Float[Tensor, " rollout"], rewards: Float[Tensor, " rollout"], group: Int[Tensor, " rollout"]
) -> tuple[Tensor, Tensor]:
    """Pairs of a better and a worse rollout of one group that `z` ranks rightly, and all pairs.

    Ties count half. The quotient is the AUC within groups.

    >>> r, g = torch.tensor([1., 0., 0.]), torch.tensor([0, 0, 0])
    >>> ranking_accuracy(torch.tensor([2., 1., 3.]), r, g)
    (tensor(1.), tensor(2.))
    """
    better = (group[:, None] == group) & (rewards[:, None] > rewards)
    right = (z[:, None] > z).float() + 0.5 * (z[:, None] == z).float()
    return (right * better).sum(), better.sum().float()


def last_value(scores: StepScores) -> Float[Tensor, " rollout"]:
    """Value of each whole rollout: that of its last step."""
    last = (scores.mask.sum(1) - 1).clamp(min=0)
    return scores.values.gather(1, last[:, None])[:, 0]


def weight_entropy(
    weights: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Float[Tensor, " rollout"]:
    """Entropy of a rollout's step weights over that of uniform ones; NaN below two steps.

    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> weight_entropy(torch.tensor([[1., 1.], [3., 0.]]), m)
    tensor([1., 0.])
    """
    share = torch.where(mask, weights, 0.0)
    share = share / share.sum(1, keepdim=True).clamp(min=1e-12)
    entropy = torch.special.entr(share).sum(1)
    count = mask.sum(1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), math.nan).clamp(0, 1)


def variance_parts(
    weights: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> tuple[Tensor, Tensor]:
    """Squared deviations of weights within rollouts, and altogether.

    Their quotient ``E_i Var_t(w) / Var(w)`` is 0 in the collapse that entropy does not see: one
    constant per rollout, different across rollouts.

    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> variance_parts(torch.tensor([[1., 1.], [3., 3.]]), m)
    (tensor(0.), tensor(4.))
    """
    count = mask.sum(1, keepdim=True)
    mean = (weights * mask).sum(1, keepdim=True) / count.clamp(min=1)
    everywhere = (weights * mask).sum() / count.sum().clamp(min=1)
    within = torch.where(mask, weights - mean, 0.0).square().sum()
    return within, torch.where(mask, weights - everywhere, 0.0).square().sum()


def first_error(
    truth: Bool[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Int[Tensor, " rollout"]:
    """Step of the first error of each rollout; -1 where there is none.

    >>> first_error(torch.tensor([[True, False], [True, True]]), torch.ones(2, 2).bool())
    tensor([ 1, -1])
    """
    wrong = mask & ~truth
    return torch.where(wrong.any(1), wrong.float().argmax(1), -1)


def agreement(
    ours: Float[Tensor, "rollout step"],
    theirs: Float[Tensor, "rollout step"],
    mask: Bool[Tensor, "rollout step"],
) -> dict[str, Tensor]:
    """How far two judges of the same steps agree, by their scores in [0, 1].

    Returns:
        ``rank_correlation``: Spearman's, over all steps. ``first_error_agreement``: share of
        rollouts in which both name the same first unsound step (score below .5), or none.

    >>> ours, theirs = torch.tensor([[.9, .2], [.8, .7]]), torch.tensor([[.8, .4], [.7, .3]])
    >>> agreement(ours, theirs, torch.ones(2, 2).bool())["first_error_agreement"]
    tensor(0.5000)
    """
    first = [first_error(scores >= SOUND_FROM, mask) for scores in (ours, theirs)]
    return {
        "rank_correlation": spearman_corrcoef(ours[mask].float(), theirs[mask].float()),
        "first_error_agreement": (first[0] == first[1]).float().mean(),
    }


def rollout_sums(rollouts: Rollouts) -> Sums:
    """Rewards, lengths and diversity of the rollouts; names as in TRL where TRL has them."""
    lengths, truncated = rollouts.completion_lengths.float(), rollouts.truncated
    rewards, group = rollouts.rewards, rollouts.group
    known = ~rewards.isnan()
    one_each = 1 / group_sum(torch.ones_like(rewards), group)  # sums to 1 over a group
    mixed = group_sum(mixed_groups(rewards, group).float(), group) > 0
    dead = (group_sum(known.float(), group) > 0) & ~mixed
    deviation = group_std(rewards, group)
    level = group_mean(rewards, group)
    penalties = torch.zeros_like(rewards) if rollouts.penalties is None else rollouts.penalties
    masked = torch.zeros_like(truncated) if rollouts.masked is None else rollouts.masked
    parts = [] if rollouts.parts is None else rollouts.parts.unbind(1)
    return {f"rewards/part{k}/mean": mean_of(part) for k, part in enumerate(parts, 1)} | {
        "reward": mean_of(rewards),
        "reward_std": mean_of(deviation),
        "reward_var_within_group": mean_of(deviation.square()),
        "frac_reward_zero_std": ((dead * one_each).sum(), one_each.sum()),
        "group/all_zero": ((dead & (level == 0)).float() @ one_each, one_each.sum()),
        "group/all_one": ((dead & (level == 1)).float() @ one_each, one_each.sum()),
        "shaping/penalty": mean_of(penalties),
        "shaping/masked": mean_of(masked),
        "verifier/none_frac": mean_of(~known),
        "verifier/killed_frac": mean_of(torch.tensor([v.killed for v in rollouts.verdicts])),
        "timing/verdict": mean_of(torch.tensor([v.seconds for v in rollouts.verdicts])),
        "entropy": mean_of(rollouts.entropy, rollouts.sampled),
        "completions/mean_length": mean_of(lengths),
        "completions/mean_terminated_length": mean_of(lengths, ~truncated),
        "completions/clipped_ratio": mean_of(truncated),
        "group/distinct_completions": (_distinct_per_group(rollouts), one_each.sum()),
    }


def credit_sums(
    rollouts: Rollouts,
    scores: StepScores,
    weights: Float[Tensor, "rollout step"],
    advantages: Float[Tensor, "rollout step"],
) -> Sums:
    """What the credit rule did; weights are those before the gate, where there is an advantage."""
    mask, lengths = scores.mask, scores.lengths
    bent = scores.advantages != 0
    seen = mask & bent[:, None]
    entropy = torch.where(bent, weight_entropy(weights, mask), math.nan)
    per_token = spread_steps(advantages, rollouts.step).abs()
    plain = (scores.advantages.abs() * lengths.sum(1)).sum()
    sums = {
        "step/count_mean": mean_of(mask.sum(1)),
        "step/len_tokens_mean": mean_of(lengths, mask),
        "step/value_mean": mean_of(scores.values, mask),
        "step/weight_mean": mean_of(weights, seen),
        "step/weight_entropy": mean_of(entropy),
        "step/frac_uniform": mean_of((entropy > UNIFORM_OVER).float(), ~entropy.isnan()),
        "step/frac_collapsed": mean_of((entropy < COLLAPSED_UNDER).float(), ~entropy.isnan()),
        "step/within_variance_share": variance_parts(weights, seen),
        "step/adv_mass_ratio": (per_token.sum(), plain),
        "step/effective_tokens": mean_of(per_token > NEAR_ZERO, rollouts.sampled),
        "step/top10_text_share": _top_texts(rollouts, per_token),
        "estimator/auc": ranking_accuracy(last_value(scores), rollouts.rewards, rollouts.group),
    }
    for quarter, part in enumerate(advantage_by_position(rollouts, per_token, 4), 1):
        sums[f"step/advantage_quarter{quarter}"] = part
    return sums


def advantage_by_position(
    rollouts: Rollouts, per_token: Float[Tensor, "rollout token"], bins: int
) -> list[tuple[Tensor, Tensor]]:
    """Sum and count of absolute token advantages in each part of the rollouts, first to last."""
    index = rollouts.sampled.long().cumsum(1) - 1
    part = index * bins // rollouts.completion_lengths.clamp(min=1)[:, None]
    return [mean_of(per_token, rollouts.sampled & (part == b)) for b in range(bins)]


def _distinct_per_group(rollouts: Rollouts) -> Tensor:
    """Number of different completions, summed over groups."""
    whole = torch.where(rollouts.sampled, 0, -1)
    prints = step_fingerprints(rollouts.tokens, whole, 1)[:, 0]
    return torch.tensor(float(len(torch.stack([rollouts.group, prints], 1).unique(dim=0))))


def _top_texts(
    rollouts: Rollouts, per_token: Float[Tensor, "rollout token"]
) -> tuple[Tensor, Tensor]:
    """Absolute credit on the ten most frequent step texts of the batch, and on all."""
    steps = rollouts.steps
    prints = step_fingerprints(rollouts.tokens, rollouts.step, steps)
    credit = pool_steps(per_token, rollouts.step, steps, "sum")
    exists = step_lengths(rollouts.step, steps) > 0
    _, text, often = prints[exists].unique(return_inverse=True, return_counts=True)
    by_text = credit.new_zeros(len(often)).index_add(0, text, credit[exists])
    top = often.argsort(descending=True, stable=True)[:TOP_TEXTS]
    return by_text[top].sum(), credit.sum()


class Accuracy(Metric):
    """Share of problems solved, with a 95 % interval (Wilson, 1927)."""

    solved: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("solved", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, rewards: Float[Tensor, " rollout"]) -> None:
        """Count rewards of 1; a rollout without a verdict is not solved."""
        self.solved += (rewards == 1).sum()
        self.total += len(rewards)

    def compute(self) -> dict[str, Tensor]:
        """The share and the bounds of its interval."""
        low, high = wilson_interval(float(self.solved), float(self.total))
        share = self.solved / self.total.clamp(min=1)
        return {"accuracy": share, "low": torch.tensor(low), "high": torch.tensor(high)}


def wilson_interval(successes: float, trials: float, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a share (Wilson, 1927); z is 1.96 for 95 %.

    >>> [round(x, 3) for x in wilson_interval(50, 100)]
    [0.404, 0.596]
    """
    if trials == 0:
        return 0.0, 1.0
    share, denominator = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)

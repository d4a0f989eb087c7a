"""What step credit is audited against: exact advantages by re-rollouts, step truth, gradients."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.functional import spread_steps, step_advantages, step_lengths
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Problem, Rollouts
from ssgrpo_lightning.rollouts import Judge, Resampler, step_prefixes, step_texts

PerStep = Float[Tensor, "rollout step"]


def exact_gains(
    policy: Policy, rollouts: Rollouts, judge: Judge, sampling: Sampling, repeats: int
) -> PerStep:
    """Advantage of every step: mean reward of `repeats` re-rollouts from after it, minus before it.

    After the last step the value is the rollout's own reward. Source: VinePPO (2410.01679).
    """
    mask = step_lengths(rollouts.step, rollouts.steps) > 0
    resample = Resampler(policy, TransformersEngine(), judge, sampling, seed=1)
    found = resample(step_prefixes(rollouts, mask), repeats, rollouts.policy_step)
    before = torch.zeros(mask.shape).masked_scatter(mask, found)
    return step_advantages(before.roll(-1, 1), rollouts.rewards, before[:, 0], mask)


def step_labels(
    rollouts: Rollouts, policy: Policy, label: Callable[[Problem, Sequence[str]], list[bool]]
) -> Bool[Tensor, "rollout step"]:
    """A task's own label of every step; False where there is none."""
    labels = torch.zeros(len(rollouts), rollouts.steps, dtype=torch.bool)
    for row, problem in enumerate(rollouts.problems):
        found = label(problem, step_texts(rollouts, policy, row))
        labels[row, : len(found)] = torch.tensor(found, dtype=torch.bool)
    return labels


def auc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Share of (positive, negative) pairs that the scores rank rightly; ties count half.

    >>> auc(torch.tensor([.9, .2, .5, .2]), torch.tensor([True, False, False, True]))
    0.625
    """
    ordered, index = scores.sort()
    rank = torch.empty(len(scores), dtype=torch.float64)
    _, run, often = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    middle = often.cumsum(0) - (often - 1) / 2
    rank[index] = middle[run].double()
    wins, losses = int(positive.sum()), int((~positive).sum())
    if not wins or not losses:
        return float("nan")
    return float((rank[positive].sum() - wins * (wins + 1) / 2) / (wins * losses))


def correlation(x: Tensor, y: Tensor, weight: Tensor) -> float:
    """Correlation under weights; NaN where one of them does not vary.

    >>> w = torch.tensor([1., 1., 2.])
    >>> round(correlation(torch.tensor([0., 1., 1.]), torch.tensor([0., 2., 2.]), w), 4)
    1.0
    """
    x, y = x - (weight * x).sum() / weight.sum(), y - (weight * y).sum() / weight.sum()
    norm = ((weight * x * x).sum() * (weight * y * y).sum()).sqrt()
    return float((weight * x * y).sum() / norm) if norm > 1e-12 else float("nan")


def first_error(
    truth: Bool[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Int[Tensor, " rollout"]:
    """Step of the first error of each rollout; -1 where there is none.

    >>> first_error(torch.tensor([[True, False], [True, True]]), torch.ones(2, 2).bool())
    tensor([ 1, -1])
    """
    wrong = mask & ~truth
    return torch.where(wrong.any(1), wrong.float().argmax(1), -1)


def gradient_snr(
    policy: Policy, rollouts: Rollouts, exact: PerStep, credits: dict[str, PerStep]
) -> dict[str, float]:
    """Signal-to-noise ratio of one group's policy gradient under each credit.

    Signal: squared length of the mean gradient along the direction of the exact policy gradient,
    which is taken from the other half of the groups. Noise: total variance between groups.
    """
    groups = rollouts.group.unique()
    names = ["exact", *credits]
    advantages = [spread_steps(c, rollouts.step) for c in (exact, *credits.values())]
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in weights)
    sums, squares = torch.zeros(2, len(names), size), torch.zeros(2, len(names))
    for index, group in enumerate(tqdm(groups.tolist(), desc="gradients")):
        rows = (rollouts.group == group).nonzero()[:, 0]
        part, span = rollouts.select(rows), rollouts.columns(rows)
        logprobs, _ = policy(part.tokens, part.attended, part.sampled)
        for i, advantage in enumerate(advantages):
            loss = (advantage[rows, span] * logprobs).sum() / len(rows)
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
            flat = torch.cat([g.flatten() for g in grads])
            sums[index % 2, i] += flat
            squares[index % 2, i] += flat.square().sum()
    counts = torch.tensor([(len(groups) + 1) // 2, len(groups) // 2])
    means = sums / counts[:, None, None]
    noise = (squares / counts[:, None] - means.square().sum(-1)).clamp(min=1e-20)
    direction = means[:, :1] / means[:, :1].norm(dim=-1, keepdim=True).clamp(min=1e-20)
    signal = (means * direction.flip(0)).sum(-1).clamp(min=0).square()
    ratio = (signal / noise).mean(0)
    return dict(zip(names, ratio.tolist()))


def tokens_per_step(rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
    """Tokens of every step, as weights of a mean over tokens."""
    return step_lengths(rollouts.step, rollouts.steps).float()

"""What step credit is audited against: exact advantages by re-rollouts, step truth, gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.functional import spread_steps, step_advantages, step_lengths
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import Judge, Resampler, step_prefixes

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


class Gradients(NamedTuple):
    """Policy gradients of each credit, in blocks of groups, by their inner products.

    Attributes:
        own: Products of the block sums of a credit with one another.
        exact: Products of the block sums of a credit with those of the exact advantage.
        squares: Sum over a block of the squared lengths of its groups' gradients.
        groups: Groups in each block.
    """

    own: Float[Tensor, "credit block block"]
    exact: Float[Tensor, "credit block block"]
    squares: Float[Tensor, "credit block"]
    groups: Float[Tensor, " block"]


def gradients(
    policy: Policy, rollouts: Rollouts, exact: PerStep, credits: Sequence[PerStep], blocks: int = 20
) -> Gradients:
    """Gradients of the policy objective under the exact advantage, then under each credit.

    Args:
        policy: Whose gradient it is.
        rollouts: Whole groups.
        exact: Advantage of every step that sets the direction.
        credits: Advantages of every step to compare.
        blocks: Parts that the groups are dealt to.
    """
    advantages = [spread_steps(c, rollouts.step) for c in (exact, *credits)]
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    sums = torch.zeros(len(advantages), blocks, sum(p.numel() for p in weights))
    squares, count = torch.zeros(sums.shape[:2]), torch.zeros(blocks)
    for index, group in enumerate(tqdm(rollouts.group.unique().tolist(), desc="gradients")):
        block = index % blocks
        rows = (rollouts.group == group).nonzero()[:, 0]
        part, span = rollouts.select(rows), rollouts.columns(rows)
        logprobs, _ = policy(part.tokens, part.attended, part.sampled)
        for i, advantage in enumerate(advantages):
            loss = (advantage[rows, span] * logprobs).sum() / len(rows)
            grads = torch.autograd.grad(loss, weights, retain_graph=True)
            flat = torch.cat([g.flatten() for g in grads])
            sums[i, block] += flat
            squares[i, block] += flat.square().sum()
        count[block] += 1
    return Gradients(sums @ sums.transpose(1, 2), sums @ sums[0].T, squares, count)


def snr(of: Gradients, weight: Float[Tensor, "draw block"]) -> Float[Tensor, "draw credit"]:
    """Signal-to-noise ratio of one group's policy gradient under each credit.

    Signal: squared length of the mean gradient along the direction of the exact policy gradient,
    which is taken from the other half of the blocks. Noise: total variance between groups.

    Args:
        of: The gradients; the first credit is the exact advantage.
        weight: How often each block counts, for each draw.
    """
    halves = weight[:, ::2], weight[:, 1::2]
    ratios = []
    for here, (w, other) in enumerate((halves, halves[::-1])):
        mine, theirs = slice(here, None, 2), slice(1 - here, None, 2)
        n, n_other = w @ of.groups[mine], other @ of.groups[theirs]
        square = torch.einsum("da,cab,db->dc", w, of.own[:, mine, mine], w) / n[:, None] ** 2
        norm = torch.einsum("da,ab,db->d", other, of.own[0, theirs, theirs], other).sqrt() / n_other
        along = torch.einsum("da,cab,db->dc", w, of.exact[:, mine, theirs], other)
        signal = (along / (n * n_other * norm)[:, None]).clamp(min=0).square()
        noise = w @ of.squares[:, mine].T / n[:, None] - square
        ratios.append(signal / noise.clamp(min=1e-20))
    return (ratios[0] + ratios[1]) / 2


def tokens_per_step(rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
    """Tokens of every step, as weights of a mean over tokens."""
    return step_lengths(rollouts.step, rollouts.steps).float()


def blame_shares(credit: PerStep, tokens: PerStep) -> PerStep:
    """Blame of each token of a step over that of the whole rollout; a step not blamed has 0.

    >>> credit, tokens = torch.tensor([[-1., -3., 2.]]), torch.tensor([[1., 3., 1.]])
    >>> blame_shares(credit, tokens)
    tensor([[0.1000, 0.3000, 0.0000]])
    """
    blame = (-credit).clamp(min=0)
    return blame / (blame * tokens).sum(1, keepdim=True).clamp(min=1e-9)


def blamed_most(share: PerStep, mask: Bool[Tensor, "rollout step"]) -> PerStep:
    """Chance of each step to be picked as the most blamed; steps blamed alike are picked alike.

    >>> share = torch.tensor([[.3, .3, .1], [.2, .5, 0.]])
    >>> blamed_most(share, torch.ones(2, 3, dtype=torch.bool))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 1.0000, 0.0000]])
    """
    shown = torch.where(mask, share, -1.0)
    top = (shown >= shown.amax(1, keepdim=True) - 1e-6).float() * mask
    return top / top.sum(1, keepdim=True).clamp(min=1)

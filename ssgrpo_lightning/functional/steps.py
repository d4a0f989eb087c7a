"""Between tokens and steps."""

from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ssgrpo_lightning.functional.shapes import (
    Groups,
    PerRollout,
    PerStep,
    PerToken,
    StepMask,
    Steps,
)


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


def lay_out_steps(
    tokens: Steps,
    attended: Bool[Tensor, "rollout token"],
    step: Steps,
    mask: StepMask,
    separator: int | None = None,
) -> tuple[Int[Tensor, "rollout position"], Int[Tensor, " rollout"], Int[Tensor, "rollout step"]]:
    """Prompt and steps without padding on the left, with a separator after every step if asked for.

    Args:
        tokens: Token ids, padded anywhere.
        attended: True on everything but padding.
        step: Step of each token, -1 for the prompt.
        mask: True where the rollout has that step; a step may have no token.
        separator: Token id; None: steps follow each other.

    Returns:
        Token ids padded on the right, their number in each row, and the position of the last token
        of each step, which is its separator where there is one.

    >>> tokens, step = torch.tensor([[0, 7, 8, 8, 9]]), torch.tensor([[-1, -1, 0, 0, 1]])
    >>> lay_out_steps(tokens, tokens > 0, step, torch.ones(1, 2).bool(), separator=5)
    (tensor([[7, 8, 8, 5, 9, 5]]), tensor([6]), tensor([[3, 5]]))
    """
    more = 0 if separator is None else 1
    lengths = attended.sum(1) + more * mask.sum(1)
    prompt = (attended & (step < 0)).sum(1, keepdim=True)
    own = step_lengths(step, mask.shape[1])
    ends = prompt + own.cumsum(1) + more * mask.cumsum(1) - 1
    place = attended.cumsum(1) - 1 + more * step.clamp(min=0)
    row = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    # The gaps that the tokens leave are the separators.
    laid = tokens.new_full((len(tokens), int(lengths.max())), separator or 0)
    laid[row[attended], place[attended]] = tokens[attended]
    return laid, lengths, ends.clamp(min=0)


def step_fingerprints(tokens: Steps, step: Steps, steps: int) -> Int[Tensor, "rollout step"]:
    """A 64-bit number for the token ids of each step, in order: equal texts have equal numbers.

    Steps that do not exist have 0.

    >>> tokens, step = torch.tensor([[9, 5, 7, 7, 5, 5, 7]]), torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    >>> a, b, c = step_fingerprints(tokens, step, 3)[0]
    >>> bool(a == c), bool(a == b)
    (True, False)
    """
    column = torch.arange(step.shape[1], device=step.device).expand_as(step)
    first = torch.full((len(step), steps + 1), step.shape[1], device=step.device)
    first = first.scatter_reduce(1, step + 1, column, "amin")
    offset = column - first.gather(1, step + 1)
    mixed = (tokens + 1) * 0x2545F4914F6CDD1D + offset * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 29)) * 0x3C79AC492BA7B653
    mixed = mixed ^ (mixed >> 32)
    sums = torch.zeros(len(step), steps + 1, dtype=torch.long, device=step.device)
    return sums.scatter_add(1, step + 1, mixed)[:, 1:]


def prefix_fingerprints(tokens: Steps, step: Steps, steps: int) -> Int[Tensor, "rollout step"]:
    """A 64-bit number for the token ids of each step and of all steps before it.

    >>> tokens, step = torch.tensor([[5, 7, 5], [7, 5, 5]]), torch.tensor([[0, 1, 2], [0, 1, 2]])
    >>> prints = prefix_fingerprints(tokens, step, 3)
    >>> len(prints.unique())  # no two prefixes are equal
    6
    """
    own = step_fingerprints(tokens, step, steps)
    # Each place has an odd factor of its own, so that order matters; sums then are prefixes.
    place = 2 * torch.arange(steps, device=own.device) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D
    mixed = own * place
    return (mixed ^ (mixed >> 31)).cumsum(1)


def group_evidence(
    key: Int[Tensor, "rollout step"], mask: StepMask, rewards: PerRollout, group: Groups
) -> tuple[PerStep, PerStep]:
    """Successes and failures among the *other* rollouts of the group that contain the same step.

    A rollout counts once however often it repeats the step; one without a verdict does not count.

    Args:
        key: Number that is equal for equal steps.
        mask: True where a step exists.
        rewards: Outcomes in [0, 1]; a partial success counts for both in part.
        group: Group of each rollout.

    >>> key = torch.tensor([[1, 2], [1, 3], [1, 1]])
    >>> won, lost = group_evidence(
    ...     key, torch.ones_like(key).bool(), torch.tensor([1., 0., 0.]), torch.tensor([0, 0, 0]))
    >>> won
    tensor([[0., 0.],
            [1., 0.],
            [1., 1.]])
    >>> lost
    tensor([[2., 0.],
            [1., 0.],
            [1., 1.]])
    """
    row = torch.arange(len(key), device=key.device)[:, None].expand_as(key)[mask]
    step = torch.stack([group[:, None].expand_as(key)[mask], key[mask]], 1)
    _, kind = step.unique(dim=0, return_inverse=True)
    # Each rollout has one vote per kind of step.
    votes = torch.stack([row, kind], 1).unique(dim=0)
    count = int(kind.max()) + 1 if len(kind) else 0
    known, won = (~rewards.isnan()).to(rewards.dtype), rewards.nan_to_num()

    def others(x: PerRollout) -> PerStep:
        total = x.new_zeros(count).index_add(0, votes[:, 1], x[votes[:, 0]])
        return x.new_zeros(key.shape).masked_scatter(mask, total[kind] - x[row])

    return others(won), others(known - won)

"""Does a value fall where a step was corrupted?"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssgrpo_lightning.functional.credit import value_gains
from ssgrpo_lightning.functional.shapes import PerRollout, PerStep, StepMask


def falls_at(
    values: PerStep,
    before: Float[Tensor, "rollout _"],
    baseline: PerRollout,
    mask: StepMask,
    step: Int[Tensor, " rollout"],
    was: Int[Tensor, " rollout"],
    margin: float = 0.05,
) -> Bool[Tensor, " rollout"]:
    """Whether a rollout's value falls at the corrupted step, most there, and not before it.

    Three things must hold: no gain ``D_u`` of the corrupted rollout lies below ``D_t``; ``V_t`` is
    below what it was by more than the margin; the values of the steps before t are what they were,
    within the margin.

    Args:
        values: Values of the corrupted rollouts.
        before: Values of the same rollouts as they were sampled.
        baseline: Value before the first step.
        mask: Steps that the corrupted rollouts have.
        step: The corrupted step t.
        was: Where the step that now stands at t stood in the original.
        margin: Share of a value within which it counts as unchanged.

    >>> one, half = torch.ones(2, 3).bool(), torch.tensor([.5, .5])
    >>> before = torch.tensor([[.5, .5, .5], [.5, .5, .5]])
    >>> values = torch.tensor([[.5, .1, .1], [.4, .1, .1]])
    >>> t = torch.tensor([1, 1])
    >>> falls_at(values, before, half, one, t, t)
    tensor([ True, False])
    """
    gains, at = value_gains(values, baseline, mask), step[:, None]
    most = gains.gather(1, at)[:, 0] <= gains.amin(1)
    fell = values.gather(1, at)[:, 0] < (1 - margin) * before.gather(1, was[:, None])[:, 0]
    # The longest rollout may have lost or gained a step.
    width = min(values.shape[1], before.shape[1])
    moved = (values[:, :width] - before[:, :width]).abs() > margin * before[:, :width]
    earlier = torch.arange(width, device=step.device) < at
    stayed = ~(moved & earlier).any(1)
    return most & fell & stayed


def above_chance(
    right: Bool[Tensor, " rollout"], chance: PerRollout
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Hits beyond chance, and how many there could be; their quotient is Cohen's kappa.

    ``sum_i (h_i - c_i)`` over ``sum_i (1 - c_i)``: 1 if all are right, 0 in the mean for a guess
    that is right with probability c_i. Source: Cohen (1960), with the chance of each item.

    >>> hits, most = above_chance(torch.tensor([True, True, False]), torch.tensor([.5, .25, .25]))
    >>> hits / most
    tensor(0.5000)
    """
    return (right.to(chance.dtype) - chance).sum(), (1 - chance).sum()

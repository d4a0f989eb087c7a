"""Random orders that can be repeated: weights of steps where they do not belong."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ssgrpo_lightning.functional.shapes import PerStep, StepMask


def counted_generator(seed: int, *counters: int) -> torch.Generator:
    """A CPU generator that depends on nothing but the seed and the counters.

    >>> draw = [torch.rand(2, generator=counted_generator(0, n)) for n in (3, 3, 4)]
    >>> torch.equal(draw[0], draw[1]), torch.equal(draw[0], draw[2])
    (True, False)
    """
    state = np.random.SeedSequence((seed, *counters)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def shuffled_within(weights: PerStep, mask: StepMask, generator: torch.Generator) -> PerStep:
    """Each rollout's own weights in a random order of its steps; padding stays as it is.

    >>> w, m = torch.tensor([[1., 2., 3., 9.]]), torch.tensor([[True, True, True, False]])
    >>> shuffled_within(w, m, counted_generator(0)).sort().values
    tensor([[1., 2., 3., 9.]])
    """
    row = mask.nonzero()[:, 0]
    giver = _random_within(row, generator)
    return weights.masked_scatter(mask, weights[mask][giver])


def shuffled_across(
    weights: PerStep, mask: StepMask, kind: Int[Tensor, " rollout"], generator: torch.Generator
) -> PerStep:
    """Every weight goes to a step of another rollout of the same kind; padding stays as it is.

    The rollouts of a kind stand on a ring in random order, the steps that give in random order
    within each rollout; a step takes the weight that stands as many places further as the longest
    rollout of its kind has steps. So no weight is lost, none is used twice, and none stays in its
    rollout unless the others of its kind have fewer steps than the longest has.

    Args:
        weights: Weights to move.
        mask: True where a step exists.
        kind: Number from 0 on of the kind of each rollout.
        generator: On the CPU.

    >>> w, m = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.ones(3, 2).bool()
    >>> moved = shuffled_across(w, m, torch.tensor([0, 0, 1]), counted_generator(0))
    >>> moved.sort(1).values  # the third has no other of its kind
    tensor([[3., 4.],
            [1., 2.],
            [5., 6.]])
    """
    row, device = mask.nonzero()[:, 0], mask.device
    place_of_rollout = torch.randperm(len(mask), generator=generator).to(device)
    block = kind[row] * len(mask) + place_of_rollout[row]
    taker, giver = block.argsort(stable=True), _random_within(block, generator)
    sizes = kind[row].bincount()
    longest = kind.new_zeros(len(sizes)).scatter_reduce(0, kind[row], mask.sum(1)[row], "amax")
    of = kind[row][taker]
    start = (sizes.cumsum(0) - sizes)[of]
    place = torch.arange(len(row), device=device)
    further = start + (place - start + longest[of]) % sizes[of]
    moved = weights.new_empty(len(row))
    moved[taker] = weights[mask][giver[further]]
    return weights.masked_scatter(mask, moved)


def _random_within(block: Int[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
    """Indices sorted by block, in random order within each."""
    mixed = torch.randperm(len(block), generator=generator).to(block.device)
    return mixed[block[mixed].argsort(stable=True)]

"""Sums, extremes and rows over all ranks. Every rank has to call each of them, in one order."""

from dataclasses import fields, replace

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.records import Outcomes


def global_sum(module: L.LightningModule, x: Tensor) -> Tensor:
    """Sum of a tensor over all ranks; every rank must call it."""
    if module.trainer.world_size == 1:
        return x
    return module.trainer.strategy.reduce(x.clone(), reduce_op="sum")  # pyright: ignore


def global_max(module: L.LightningModule, x: Tensor) -> Tensor:
    """Maximum of a tensor over all ranks; every rank must call it."""
    if module.trainer.world_size == 1:
        return x
    return module.all_gather(x).amax(0)  # pyright: ignore


def global_min(module: L.LightningModule, x: Tensor) -> Tensor:
    """Minimum of a tensor over all ranks; every rank must call it."""
    return -global_max(module, -x)


def gathered(module: L.LightningModule, x: Tensor) -> Tensor:
    """Rows of all ranks, in their order; every rank must call it, with as many."""
    if module.trainer.world_size == 1:
        return x
    return module.all_gather(x).flatten(0, 1)  # pyright: ignore


def pooled(module: L.LightningModule, x: Tensor) -> Tensor:
    """Rows of all ranks, in their order; every rank must call it, with any number of them."""
    if module.trainer.world_size == 1:
        return x
    count = torch.tensor(len(x), device=x.device)
    counts: list[int] = module.all_gather(count).tolist()  # pyright: ignore
    padded = pad(x, [0, 0] * (x.ndim - 1) + [0, max(counts) - len(x)])
    everything: Tensor = module.all_gather(padded)  # pyright: ignore
    return torch.cat([rows[:count] for rows, count in zip(everything, counts)])


def everyones(module: L.LightningModule, own: Outcomes) -> tuple[Outcomes, slice]:
    """The outcomes of all ranks, in their order, and the rows of this one.

    Every rank must call it, with as many rollouts. Groups are numbered anew, none spans ranks.
    """
    if module.trainer.world_size == 1:
        return own, slice(0, len(own))
    groups, rank = int(global_max(module, own.group.max())) + 1, module.trainer.global_rank
    numbered = replace(own, group=own.group + groups * rank)
    of_all = {
        f.name: gathered(module, value)
        for f in fields(own)
        if (value := getattr(numbered, f.name)) is not None
    }
    return replace(own, **of_all), slice(rank * len(own), (rank + 1) * len(own))

"""Sums, extremes and rows over all ranks. Every rank has to call each of them, in one order."""

from dataclasses import fields, replace
from typing import TypeVar

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.records import Outcomes

T = TypeVar("T")


def global_sum(module: L.LightningModule, x: Tensor) -> Tensor:
    """Sum of a tensor over all ranks."""
    return _reduced(module, x, dist.ReduceOp.SUM)


def global_max(module: L.LightningModule, x: Tensor) -> Tensor:
    """Maximum of a tensor over all ranks."""
    return _reduced(module, x, dist.ReduceOp.MAX)


def _reduced(module: L.LightningModule, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if module.trainer.world_size == 1:
        return x
    # Not the strategy's own `reduce`, which puts a barrier before each.
    result = x.to(module.device, copy=True)
    dist.all_reduce(result, operation)
    return result


def stacked(module: L.LightningModule, x: Tensor) -> Tensor:
    """The tensors of all ranks, which have one shape, along a new first axis."""
    parts = [torch.empty_like(x) for _ in range(module.trainer.world_size)]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)


def gathered(module: L.LightningModule, x: Tensor) -> Tensor:
    """Rows of all ranks, in their order; each has as many."""
    if module.trainer.world_size == 1:
        return x
    return stacked(module, x).flatten(0, 1)


def pooled(module: L.LightningModule, x: Tensor) -> Tensor:
    """Rows of all ranks, in their order; each has any number of them."""
    if module.trainer.world_size == 1:
        return x
    counts: list[int] = stacked(module, torch.tensor(len(x), device=x.device)).tolist()
    padded = pad(x, [0, 0] * (x.ndim - 1) + [0, max(counts) - len(x)])
    return torch.cat([rows[:count] for rows, count in zip(stacked(module, padded), counts)])


def objects(module: L.LightningModule, own: T) -> list[T]:
    """What all ranks hand in, in their order: anything that can be pickled."""
    if module.trainer.world_size == 1:
        return [own]
    everyones: list[T] = [own] * module.trainer.world_size
    dist.all_gather_object(everyones, own)
    return everyones


def everyones(module: L.LightningModule, own: Outcomes) -> tuple[Outcomes, slice]:
    """The outcomes of all ranks, in their order, and the rows of this one.

    Each has any number of rollouts. Groups are numbered anew, none spans ranks.
    """
    if module.trainer.world_size == 1:
        return own, slice(0, len(own))
    ranks = objects(module, _moved(own, torch.device("cpu")))
    width = max(0 if one.parts is None else one.parts.shape[1] for one in ranks)
    groups = 0
    for rank, one in enumerate(ranks):
        parts = one.parts
        if width and parts is None:
            # None of its rollouts has a verdict: it does not know of how many parts rewards are.
            parts = one.rewards.new_full((len(one), width), float("nan"))
        ranks[rank] = replace(one, group=one.group + groups, parts=parts)
        groups += int(one.group.max()) + 1
    names = [f.name for f in fields(own) if getattr(ranks[0], f.name) is not None]
    of_all = replace(ranks[0], **{n: torch.cat([getattr(x, n) for x in ranks]) for n in names})
    first = sum(map(len, ranks[: module.trainer.global_rank]))
    return _moved(of_all, module.device), slice(first, first + len(own))


def _moved(outcomes: Outcomes, device: torch.device) -> Outcomes:
    tensors = {f.name: getattr(outcomes, f.name) for f in fields(outcomes)}
    return replace(outcomes, **{n: x.to(device) for n, x in tensors.items() if x is not None})

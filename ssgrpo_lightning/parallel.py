"""The only file that knows strategies: sums over ranks, synchronisation, the count of updates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.policy_module import PolicyModule
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


def objects_of_ranks(trainer: L.Trainer, own: Any) -> list[Any]:
    """What every rank has, in their order, on rank 0; nothing on the others. All must call it."""
    if trainer.world_size == 1:
        return [own]
    found = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(own, found)
    return found or []


class Tally:
    """Sums of what losses report over the micro-batches and optimiser steps of a phase.

    Attributes:
        sums: The sums, of the steps that were made.
        made: Whether any was.
        skipped: Steps that were skipped because loss or gradient was not finite.
        in_a_row: Those of them since the last one that was made.
        offending: Of the last of them, the micro-batches whose loss was not finite, or all.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.made, self.skipped, self.in_a_row = False, 0, 0
        self.offending: list[Loss] = []

    def skip(self, losses: "Sequence[Loss]", values: Sequence[Tensor]) -> None:
        """Count a step that is skipped."""
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        bad = [loss for loss, value in zip(losses, values) if not bool(value.isfinite())]
        self.offending = bad or list(losses)

    def add(self, parts: dict[str, Tensor]) -> None:
        """Add detached scalars by name; of those named ``…/min`` or ``…/max`` keep the extreme."""
        for name, part in parts.items():
            value = part.detach().float()
            known = self.sums.get(name)
            self.sums[name] = value if known is None else _merging(name)(known, value)

    def means(self, module: L.LightningModule, per: str) -> dict[str, Tensor]:
        """Every sum over all ranks, divided by that of `per`.

        Losses and norms are whole already, and divided by the number of optimiser steps; extremes
        are those of all ranks.
        """
        steps = self.sums.get("steps", torch.ones(()))
        wholes = {"loss", "grad_norm"}
        over_ranks = {torch.add: global_sum, torch.minimum: global_min, torch.maximum: global_max}
        totals = {
            name: total
            if name in ("grad_norm", "steps")
            else over_ranks[_merging(name)](module, total)
            for name, total in sorted(self.sums.items())
        }
        return {
            name: total / (steps if name in wholes else totals[per]).clamp(min=1)
            if _merging(name) is torch.add
            else total
            for name, total in totals.items()
        }


def _merging(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """How two numbers of one name become one."""
    return {"min": torch.minimum, "max": torch.maximum}.get(name.rsplit("/", 1)[-1], torch.add)


# Calls a loss on a micro-batch, its first argument.
Loss = partial[tuple[Tensor, dict[str, Tensor]]]


def optimiser_step(
    root: L.LightningModule,
    module: PolicyModule | EstimatorModule,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Loss],
    tally: Tally,
) -> None:
    """One optimiser step over micro-batches; none, on any rank, where no rank has one.

    A step whose loss or gradient is not finite on any rank is skipped on all, and counted.

    Args:
        root: Module that the trainer knows.
        module: Module whose parameters move.
        optimizer: Its optimiser, unwrapped.
        losses: One call per micro-batch, which returns its loss and sums for the log.
        tally: Where the sums go.
    """
    share = torch.tensor(float(len(losses)), device=root.device)
    if not float(global_sum(root, share)):
        return
    optimizer.zero_grad()
    found = []
    for index, loss in enumerate(losses):
        with only_last_syncs(root, last=index + 1 == len(losses)):
            value, parts = loss()
            # DDP averages over ranks, and the divisor already counts them all.
            root.manual_backward(value * root.trainer.world_size)
        found.append({"loss": value.detach(), **parts})
    limit = float("inf") if module.max_grad_norm is None else module.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
    values = [parts["loss"] for parts in found]
    finite = torch.stack([norm, *values]).isfinite().all()
    if not float(global_min(root, finite.float())):
        optimizer.zero_grad()
        tally.skip(losses, values)
        return
    optimizer.step()
    tally.made, tally.in_a_row = True, 0
    for parts in [*found, {"grad_norm": norm, "steps": torch.ones_like(norm)}]:
        tally.add(parts)


@contextmanager
def only_last_syncs(module: L.LightningModule, last: bool) -> Iterator[None]:
    """Leave gradients unsynchronised until the last micro-batch of an optimiser step."""
    if last or module.trainer.world_size == 1:
        yield
        return
    with module.trainer.strategy.block_backward_sync():  # pyright: ignore
        yield


@contextmanager
def optimiser_state_on(
    device: torch.device, optimizer: torch.optim.Optimizer, offload: bool
) -> Iterator[None]:
    """Hold an optimiser's state on a device while it steps, and on the CPU at all other times.

    Args:
        device: Where the parameters are.
        optimizer: The optimiser.
        offload: False leaves its state where it is.
    """
    if not offload:
        yield
        return
    _move_state(optimizer, device)
    try:
        yield
    finally:
        _move_state(optimizer, torch.device("cpu"))


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            # Counts of steps stay where the optimiser put them.
            if isinstance(value, Tensor) and value.ndim and value.device.type != device.type:
                moved = value.to(device, non_blocking=device.type != "cpu")
                state[name] = moved.pin_memory() if value.device.type == "cuda" else moved


def count_update(module: L.LightningModule) -> None:
    """Let ``global_step`` count policy updates.

    In manual optimisation Lightning counts every step of every wrapped optimiser, so that two
    optimisers would break ``max_steps`` and checkpoint intervals. The optimisers are stepped
    unwrapped, and the counter moves by one here. This is the package's one private name of
    Lightning.
    """
    progress = module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def refuse_unsupported(module: L.LightningModule) -> None:
    """Refuse what manual optimisation with unwrapped optimisers cannot keep right.

    Raises:
        ValueError: A strategy that is not supported.
    """
    trainer = module.trainer
    name = type(trainer.strategy).__name__
    if name not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise ValueError(
            f"trainer.strategy is {name}, only a single device and ddp_find_unused_parameters_true "
            "are supported so far: choose one of them"
        )

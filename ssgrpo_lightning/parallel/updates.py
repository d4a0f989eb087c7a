"""One optimiser step over micro-batches on every rank, what it reports, the count of updates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.parallel.collectives import global_max, objects
from ssgrpo_lightning.parallel.strategies import average_whole
from ssgrpo_lightning.policy_module import PolicyModule


class Tally:
    """Sums of what losses report over the micro-batches and optimiser steps of a phase."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        """Add detached scalars by name; of those named ``…/min`` or ``…/max`` keep the extreme."""
        for name, part in parts.items():
            value = part.detach().float()
            known = self.sums.get(name)
            self.sums[name] = value if known is None else _merging(name)(known, value)

    def means(self, module: L.LightningModule, per: str) -> dict[str, Tensor]:
        """Every sum over all ranks, divided by that of `per`.

        Losses and norms are whole already, and divided by the number of optimiser steps; extremes
        are those of all ranks. A rank that only made idle passes has fewer names.
        """
        known = {name: float(total) for name, total in self.sums.items()}
        of_ranks = objects(module, known)
        totals: dict[str, Tensor] = {}
        for name in sorted({name for sums in of_ranks for name in sums}):
            parts = [torch.tensor(sums[name]) for sums in of_ranks if name in sums]
            same = name in ("grad_norm", "steps")
            totals[name] = parts[0] if same else reduce(_merging(name), parts)
        steps = totals.get("steps", torch.ones(()))
        return {
            name: total / (steps if name in ("loss", "grad_norm") else totals[per]).clamp(min=1)
            if _merging(name) is torch.add
            else total
            for name, total in totals.items()
        }


def _merging(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """How two numbers of one name become one."""
    return {"min": torch.minimum, "max": torch.maximum}.get(name.rsplit("/", 1)[-1], torch.add)


Loss = Callable[[], tuple[Tensor, dict[str, Tensor]]]


def optimiser_step(
    root: L.LightningModule,
    module: PolicyModule | EstimatorModule,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Loss],
    tally: Tally,
) -> None:
    """One optimiser step over micro-batches; none, on any rank, where no rank has one.

    Gathering weights and averaging gradients takes all ranks, so that each makes as many passes as
    the one with the most micro-batches: idle ones behind its own.

    Args:
        root: Module that the trainer knows.
        module: Module whose parameters move.
        optimizer: Its optimiser, unwrapped.
        losses: One call per micro-batch, which returns its loss and sums for the log.
        tally: Where the sums go.
    """
    passes = int(global_max(root, torch.tensor(len(losses), device=root.device)))
    if not passes:
        return
    idle = [lambda: (module.idle(), {})] * (passes - len(losses))
    optimizer.zero_grad()
    for index, loss in enumerate([*losses, *idle]):
        with only_last_syncs(root, last=index + 1 == passes):
            value, parts = loss()
            # DDP averages over ranks, and the divisor already counts them all.
            root.manual_backward(value * root.trainer.world_size)
        tally.add({"loss": value, **parts})
    average_whole(root, module)
    limit = float("inf") if module.max_grad_norm is None else module.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.step()
    tally.add({"grad_norm": norm, "steps": torch.ones_like(norm)})


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

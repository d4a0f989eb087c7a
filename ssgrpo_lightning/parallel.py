"""The only file that knows strategies: sums over ranks, synchronisation, the count of updates."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from torch import Tensor


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


@contextmanager
def only_last_syncs(module: L.LightningModule, last: bool) -> Iterator[None]:
    """Leave gradients unsynchronised until the last micro-batch of an optimiser step."""
    if last or module.trainer.world_size == 1:
        yield
        return
    with module.trainer.strategy.block_backward_sync():  # pyright: ignore
        yield


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
        ValueError: Half precision with a gradient scaler, or a strategy that is not supported.
    """
    trainer = module.trainer
    if trainer.precision == "16-mixed":
        raise ValueError(
            "trainer.precision is '16-mixed', whose gradient scaler would be stepped around: "
            "use 'bf16-mixed' or '32-true'"
        )
    name = type(trainer.strategy).__name__
    if name not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise ValueError(
            f"trainer.strategy is {name}, only a single device and ddp_find_unused_parameters_true "
            "are supported so far: choose one of them"
        )


def rank_generator(seed: int, *counters: int) -> torch.Generator:
    """A CPU generator that depends on nothing but the seed and the counters."""
    import numpy as np

    state = np.random.SeedSequence((seed, *counters)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))

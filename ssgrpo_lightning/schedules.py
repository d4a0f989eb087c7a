"""An optimiser and its learning-rate schedule, as Lightning wants them."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable


def with_schedule(
    optimizer: OptimizerCallable,
    lr_scheduler: LRSchedulerCallable | None,
    parameters: Iterator[torch.nn.Parameter],
    name: str,
) -> dict[str, Any]:
    """Lightning's form of an optimiser with an optional schedule."""
    built = optimizer([p for p in parameters if p.requires_grad])
    if lr_scheduler is None:
        return {"optimizer": built}
    return {"optimizer": built, "lr_scheduler": {"scheduler": lr_scheduler(built), "name": name}}

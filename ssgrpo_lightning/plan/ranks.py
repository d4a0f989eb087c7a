"""Processes that are not there: how many, how weights are spread over them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ssgrpo_lightning.parallel import FSDP2
from ssgrpo_lightning.plan.meter import Meter


@dataclass(frozen=True)
class Ranks:
    """What ``trainer`` in a config asks for.

    Attributes:
        count: Processes, over all hosts.
        hosts: Hosts.
        strategy: Name of Lightning's strategy, or the strategy.
        on_gpu: Whether they have GPUs.
        precision: Lightning's name of the precision.
    """

    count: int = 1
    hosts: int = 1
    strategy: str | Strategy = "auto"
    on_gpu: bool = True
    precision: str = "32-true"

    @classmethod
    def of(cls, trainer: dict[str, Any]) -> "Ranks":
        """From the arguments of a trainer, which is not built: it would look for the GPUs.

        Raises:
            ValueError: Neither a number nor a list says how many devices there are.
        """
        devices, hosts = trainer.get("devices", "auto"), int(trainer.get("num_nodes") or 1)
        found = len(devices) if isinstance(devices, list) else devices
        if found == "auto":
            found = 1
        if not str(found).isdigit() or not int(found):
            raise ValueError(
                f"trainer.devices is {devices!r}, must be a number or a list to plan for: GPUs "
                "that are not here cannot be counted"
            )
        strategy = trainer.get("strategy") or "auto"
        return cls(
            count=int(found) * hosts,
            hosts=hosts,
            strategy=StrategyRegistry.get("fsdp2") if strategy == "fsdp2" else strategy,
            on_gpu=trainer.get("accelerator") != "cpu",
            precision=str(trainer.get("precision") or "32-true"),
        )

    @property
    def fsdp2(self) -> FSDP2 | None:
        """The strategy that spreads weights; None: every rank holds them all."""
        return self.strategy if isinstance(self.strategy, FSDP2) else None

    @property
    def gathers_between_hosts(self) -> bool:
        """Whether weights are gathered over the network, and not within each host."""
        return self.hosts > 1 and (self.fsdp2 is None or self.fsdp2.replicas % self.hosts > 0)

    def compute(self, stored: torch.dtype) -> torch.dtype:
        """Precision of matrix products, of weights stored in another."""
        fsdp2 = self.fsdp2
        if fsdp2 is not None and fsdp2.precision_policy.param_dtype is not None:
            return fsdp2.precision_policy.param_dtype
        return torch.bfloat16 if self.precision.startswith("bf16") else stored

    def buckets(self, gradients: int) -> int:
        """Bytes in which DDP copies gradients to average them."""
        return gradients if self.count > 1 and self.fsdp2 is None else 0

    @property
    def unsynced(self) -> Callable[[], AbstractContextManager[None]] | None:
        """The context in which whole gradients are kept; None where none are."""
        fsdp2 = self.fsdp2
        return fsdp2.block_backward_sync if fsdp2 is not None and fsdp2.whole_gradients else None

    @contextmanager
    def spread(self, module: nn.Module) -> Iterator[None]:
        """Spread a module as on rank 0 of as many processes, whose collectives do nothing."""
        fsdp2 = self.fsdp2
        if fsdp2 is None:
            yield
            return
        # Registers the backend "fake", and what its collectives give on fake tensors.
        import torch.distributed._tools.fake_collectives  # noqa: F401
        from torch.testing._internal.distributed.fake_pg import FakeStore

        copies = fsdp2.replicas
        shape = (self.count,) if copies == 1 else (copies, self.count // copies)
        names = ("shard",) if copies == 1 else ("replica", "shard")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.count)
        try:
            fsdp2.model = module
            meter = Meter()
            meter.hold(module.parameters())
            with meter:  # knows how fake tensors get along with real masks
                fsdp2.shard(module, init_device_mesh("cpu", shape, mesh_dim_names=names))
            yield
        finally:
            dist.destroy_process_group()

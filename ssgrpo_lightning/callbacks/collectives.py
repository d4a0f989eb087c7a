"""Counts what ranks exchange: every collective of an update, by phase and name."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
# FSDP2 gathers weights into one tensor, all else is gathered as a list.
NAMES = {
    "_allgather_base": "all_gather_weights",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_weights",
    "all_gather_into_tensor": "all_gather_weights",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
}


class CollectiveCount(L.Callback):
    """Writes ``collectives.json``: the collectives of each update, by phase and name.

    For looking, not for training: every operation of torch passes through it, and takes longer.

    Args:
        path: File to write, by rank 0; null: ``collectives.json`` in the run folder.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.updates: list[dict[str, Counter[str]]] = []
        self.mode = _Counting()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self.mode.__enter__()

    def on_train_batch_start(self, *_: Any) -> None:
        """A new update; what comes before its first phase is Lightning's own."""
        self.updates.append({})
        self._enter("lightning")

    def on_phase_start(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> None:
        """What follows belongs to this phase."""
        self._enter(name)

    def _enter(self, phase: str) -> None:
        self.mode.counts = self.updates[-1].setdefault(phase, Counter())

    def on_train_batch_end(self, *_: Any) -> None:
        """What comes between updates belongs to none, such as a validation."""
        self.mode.counts = Counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop counting, and write."""
        self.mode.__exit__(None, None, None)
        folder = trainer.log_dir or trainer.default_root_dir
        if trainer.is_global_zero:
            path = Path(self.path or Path(folder) / "collectives.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.updates, indent=1))


class _Counting(TorchDispatchMode):
    """Adds every collective that runs to `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on what this rank holds
        if func.namespace in NAMESPACES and "wait" not in func.__name__:
            name = str(func._schema.name).split("::")[1].rstrip("_")
            self.counts[str(NAMES.get(name, name))] += 1
        return func(*args, **(kwargs or {}))

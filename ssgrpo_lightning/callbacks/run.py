"""What a run leaves in its folder besides metrics: its config, and predicted rollouts."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

# Not part of what is run.
ASIDE = ("ckpt_path",)


class RunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's own folder, every checkpoint, and W&B's config.

    Lightning's own way collides with the file of an earlier run under W&B. Where a run goes on in
    its folder under another config, the former file stays as ``config-1.yaml``, and so on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False})

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Asking for it is a broadcast, and only rank 0 comes to `save_config`.
        self.log_dir = trainer.log_dir
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.log_dir is not None:
            folder = Path(self.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _write_config(folder / "config.yaml", self.text)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                dumped = yaml.safe_load(self.text)
                logger.experiment.config.update({"cli": dumped}, allow_val_change=True)

    @cached_property
    def text(self) -> str:
        """The config as YAML."""
        return self.parser.dump(self.config, skip_none=False)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = yaml.safe_load(self.text)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING and "config" in checkpoint:
            found = differences(checkpoint["config"], yaml.safe_load(self.text))
            if found:
                lines = "\n".join(f"  {line}" for line in found)
                rank_zero_info(f"the checkpoint was written under another config:\n{lines}")


def _write_config(file: Path, text: str) -> None:
    """Write the config of a run; one of another content that stands there keeps a number."""
    if file.exists() and _without_aside(file.read_text()) != _without_aside(text):
        numbers = count(1)
        file.rename(next(n for k in numbers if not (n := file.with_stem(f"config-{k}")).exists()))
    file.write_text(text)


def _without_aside(text: str) -> dict[str, Any]:
    return {name: value for name, value in yaml.safe_load(text).items() if name not in ASIDE}


def differences(old: Any, new: Any, field: str = "") -> list[str]:
    """Fields that differ between two configs, as lines ``field: old -> new``.

    >>> differences({"lr": 0.1, "a": {"b": 1, "c": 2}}, {"lr": 0.1, "a": {"b": 3}})
    ['a.b: 1 -> 3', 'a.c: 2 -> not set']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if field or name not in ASIDE]
        unset = "not set"
        return [
            line
            for name in names
            for line in differences(
                old.get(name, unset), new.get(name, unset), f"{field}.{name}" if field else name
            )
        ]
    if old == new:
        return []
    stays = " (not taken over: an optimiser's settings are those saved with its state)"
    kept = ".optimizer." in field or ".lr_scheduler." in field
    return [f"{field}: {old} -> {new}{stays if kept else ''}"]


class PredictionWriter(BasePredictionWriter):
    """Writes the grouped rollouts of ``predict`` as JSON lines, one rollout a line.

    A line holds what `StoredRollouts` needs to fit an estimator, and every step with its span of
    completion tokens, value, weight and advantage.

    Args:
        path: File to write; null: ``predictions.jsonl`` in the run folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path, self.groups = path, 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        self.file = Path(self.path) if self.path else folder / "predictions.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")
        self.groups = 0

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        with self.file.open("a") as file:
            for row in prediction:
                file.write(json.dumps({**row, "group": row["group"] + self.groups}) + "\n")
        self.groups += 1 + max((row["group"] for row in prediction), default=-1)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rank_zero_info(f"{self.groups} groups written to {self.file}")

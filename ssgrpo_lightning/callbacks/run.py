"""What a run leaves in its folder besides metrics: its config, and predicted rollouts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info


class RunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's own folder and the same to W&B's config.

    Lightning's own way collides with the file of an earlier run under W&B.
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
            text = self.parser.dump(self.config, skip_none=False)
            (folder / "config.yaml").write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import yaml

                dumped = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
                logger.experiment.config.update({"cli": dumped}, allow_val_change=True)


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

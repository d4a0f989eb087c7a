"""W&B's axis and histograms."""

from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import WandbLogger

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.functional import spread_steps
from ssgrpo_lightning.metrics import advantage_by_position

BINS = 10


class WandbRun(L.Callback):
    """Makes ``policy_step`` the axis of every W&B chart and logs histograms; idle without W&B.

    Args:
        every: Updates between two sets of histograms.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"wandb_run.every is {every}, must be at least 1")
        self.every = every

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.define_metric("policy_step")
                logger.experiment.define_metric("*", step_metric="policy_step")

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        runs = [x for x in trainer.loggers if isinstance(x, WandbLogger)]
        if not runs or not isinstance(pl_module, SSGRPO) or pl_module.policy_step % self.every:
            return
        import wandb

        rollouts, scores = outputs["rollouts"], outputs["scores"]
        per_token = spread_steps(outputs["step_advantages"], rollouts.step).abs()
        parts = advantage_by_position(rollouts, per_token, BINS)
        means = np.array([float(total / count) if count else 0.0 for total, count in parts])
        edges = np.linspace(0, 1, BINS + 1)
        charts = {
            "step/advantage_by_position": wandb.Histogram(np_histogram=(means, edges)),
            "step/weights": wandb.Histogram(outputs["weights"][scores.mask].cpu().numpy()),
            "policy_step": pl_module.policy_step,
        }
        for logger in runs:
            logger.experiment.log(charts)

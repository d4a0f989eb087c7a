"""The entropy watch of the recipe, with its margin control."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.metrics import UNIFORM_OVER


class WeightEntropy(L.Callback):
    """Raises the margin of the estimator's objective when step weights stay near uniform.

    Watches ``step/weight_entropy``, the mean normalised entropy of a rollout's step weights before
    the gate. Acts only where the objective has a margin and the gate is open; every change is
    logged as ``estimator/margin``.

    Args:
        uniform_over: Entropy above which weights count as near uniform.
        patience: Updates in a row that must be near uniform before the margin rises.
        factor: The margin is multiplied by this.
        max_margin: Bound of the margin, in nats.
    """

    def __init__(
        self,
        uniform_over: float = UNIFORM_OVER,
        patience: int = 10,
        factor: float = 1.5,
        max_margin: float = 2.0,
    ) -> None:
        rules = {
            "uniform_over": (uniform_over, 0 < uniform_over <= 1, "in (0, 1]"),
            "patience": (patience, patience >= 1, "at least 1"),
            "factor": (factor, factor > 1, "greater than 1"),
            "max_margin": (max_margin, max_margin > 0, "greater than 0"),
        }
        for field, (value, holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"weight_entropy.{field} is {value}, must be {rule}")
        self.uniform_over, self.patience = uniform_over, patience
        self.factor, self.max_margin = factor, max_margin
        self.uniform_updates = 0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, SSGRPO) or pl_module.estimator is None:
            return
        estimator, margin = pl_module.estimator, pl_module.estimator.margin
        if margin is None or outputs["metrics"]["step/gate"] == 0:
            return
        uniform = outputs["metrics"]["step/weight_entropy"] > self.uniform_over
        self.uniform_updates = self.uniform_updates + 1 if uniform else 0
        raised = min(margin * self.factor, self.max_margin)
        if self.uniform_updates >= self.patience and raised > margin:
            self.uniform_updates = 0
            estimator.margin = raised
            for logger in trainer.loggers:
                logger.log_metrics(
                    {"estimator/margin": raised, "policy_step": pl_module.policy_step},
                    step=pl_module.policy_step,
                )
            rank_zero_info(
                f"update {pl_module.policy_step}: step weights near uniform for {self.patience} "
                f"updates, margin raised from {margin:.3g} to {raised:.3g}"
            )

    def state_dict(self) -> dict[str, int]:
        return {"uniform_updates": self.uniform_updates}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.uniform_updates = state_dict["uniform_updates"]

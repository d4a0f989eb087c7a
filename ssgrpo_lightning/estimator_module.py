"""The estimator as a LightningModule: its network, its objective, its optimiser. Knows no rank.

Fitted by `alternation.SSGRPO` while the policy learns, or alone on stored rollouts.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.estimators import CausalSteps, Estimator
from ssgrpo_lightning.metrics import last_value, ranking_accuracy
from ssgrpo_lightning.objectives import NoisyAnd, Objective
from ssgrpo_lightning.records import Rollouts, ScoredRollouts, StepScores
from ssgrpo_lightning.rollouts import whole_groups
from ssgrpo_lightning.schedules import with_schedule

SKILL_MEMORY = 0.9


class EstimatorModule(L.LightningModule):
    """Owns the estimator and says what its loss on whole groups of rollouts is.

    Args:
        optimizer: Optimiser of the estimator.
        estimator: Network that reads rollouts.
        objective: What its logits mean and are trained toward.
        lr_scheduler: Learning-rate schedule, one step per update; null: constant.
        micro_batch_groups: Groups of one forward and backward pass.
        max_grad_norm: Gradients are clipped to this global norm; null: never.
        checkpoint: Lightning checkpoint of an estimator that was fitted alone, to start from.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable,
        estimator: Estimator | None = None,
        objective: Objective = NoisyAnd(),
        lr_scheduler: LRSchedulerCallable | None = None,
        micro_batch_groups: int = 64,
        max_grad_norm: float | None = 1.0,
        checkpoint: str | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_groups < 1:
            raise ValueError(
                f"estimator.micro_batch_groups is {micro_batch_groups}, must be at least 1"
            )
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(
                f"estimator.max_grad_norm is {max_grad_norm}, must be greater than 0, or null for "
                "no clipping"
            )
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise ValueError(
                f"estimator.checkpoint is {checkpoint!r}, which is no file: fit an estimator alone "
                "with configs/estimator.yaml, or set it to null"
            )
        self.estimator = CausalSteps() if estimator is None else estimator
        self.objective, self.max_grad_norm = objective, max_grad_norm
        self.micro_batch_groups = micro_batch_groups
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.checkpoint, self.ready = checkpoint, False
        # From 0, so that an estimator has to earn its skill, and one lucky probe is none.
        self.mean_skill = 0.0

    @property
    def learns(self) -> bool:
        """False for an estimator without weights to train, such as those of `baselines`."""
        return any(p.requires_grad for p in self.parameters())

    @property
    def margin(self) -> float | None:
        """Margin of the objective, where it has one."""
        return getattr(self.objective, "margin", None)

    @margin.setter
    def margin(self, value: float) -> None:
        self.objective = replace(self.objective, margin=value)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def note_skill(self, skill: float) -> None:
        """Let the running mean of the step skill follow a new measurement, in (-inf, 1]."""
        self.mean_skill = SKILL_MEMORY * self.mean_skill + (1 - SKILL_MEMORY) * skill

    def get_extra_state(self) -> dict[str, float | None]:
        """Margin and skill move while training, so they are saved with the weights."""
        return {"margin": self.margin, "mean_skill": self.mean_skill}

    def set_extra_state(self, state: dict[str, float | None]) -> None:
        if self.margin is not None and state["margin"] is not None:
            self.margin = state["margin"]
        self.mean_skill = state.get("mean_skill") or 0.0

    def configure_model(self) -> None:
        if self.ready:
            return
        self.ready = True
        self.estimator.load()
        if self.checkpoint is not None:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            try:
                self.load_state_dict(state["state_dict"])
            except RuntimeError as error:
                raise ValueError(
                    f"estimator.checkpoint is {self.checkpoint!r}, which is not of a "
                    f"{type(self.estimator).__name__} of this size: name the estimator it was "
                    "fitted with (configs/estimator.yaml fits a CausalSteps)"
                ) from error

    def configure_optimizers(self) -> Any:
        if not self.learns:
            raise ValueError(
                f"estimator.estimator is {type(self.estimator).__name__}, which has nothing to "
                "learn: use it in SSGRPO as it is, or fit one with weights, such as CausalSteps"
            )
        return with_schedule(self.optimizer, self.lr_scheduler, self.parameters(), "lr/estimator")

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        """Logit of every step of the objective's view."""
        return self.estimator(self.objective.view(rollouts))

    @torch.no_grad()
    def score(self, rollouts: Rollouts, outcomes: StepScores) -> StepScores:
        """Outcomes with the estimator's scores and values, as it is before it learns from them."""
        before = self.estimator.calls
        viewed = self.objective.view(rollouts).steps
        logits = rollouts.logprobs.new_zeros(len(rollouts), viewed)
        for rows in whole_groups(rollouts, self.micro_batch_groups):
            part = self.forward(rollouts.select(rows))
            logits[rows, : part.shape[1]] = part.to(logits.dtype)
        outcomes = replace(outcomes, calls=self.estimator.calls - before)
        return self.objective.read(logits, outcomes)

    def idle(self) -> Tensor:
        """A pass that teaches nothing, while other ranks have more micro-batches: 0."""
        return self.estimator.idle()

    def learnable(self, rollouts: Rollouts) -> Bool[Tensor, " rollout"]:
        """Rollouts that teach the estimator something."""
        return self.objective.learnable(rollouts.rewards, rollouts.group)

    def loss(
        self, batch: ScoredRollouts, divisor: Float[Tensor, ""]
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Loss of a micro-batch of whole groups, and sums for the log (none).

        Args:
            batch: The micro-batch.
            divisor: Learnable rollouts of the whole optimiser step.
        """
        logits = self.forward(batch.rollouts)
        return self.objective.loss(logits, batch.scores).sum() / divisor, {}

    def fresh_loss(self, rollouts: Rollouts) -> tuple[Float[Tensor, ""], StepScores]:
        """Mean loss of whole groups that come in only now, and how the same pass reads them."""
        logits = self.forward(rollouts)
        scores = self.objective.read(logits.detach(), outcome_scores(rollouts))
        learnable = self.learnable(rollouts).sum().clamp(min=1)
        return self.objective.loss(logits, scores).sum() / learnable, scores

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> Tensor:
        """Fit alone: one optimiser step on a batch of stored groups."""
        loss, _ = self.fresh_loss(rollouts)
        self.log("estimator/loss", loss, prog_bar=True, batch_size=len(rollouts))
        return loss

    def validation_step(self, rollouts: Rollouts, batch_idx: int) -> None:
        """Fit alone: loss on groups held out, and how well the last value ranks within a group."""
        loss, scores = self.fresh_loss(rollouts)
        right, pairs = ranking_accuracy(last_value(scores), rollouts.rewards, rollouts.group)
        learnable = int(self.learnable(rollouts).sum())
        self.log("val/estimator_loss", loss, prog_bar=True, batch_size=learnable)
        self.log("val/auc", right / pairs, prog_bar=True, batch_size=int(pairs))


class BestEpoch:
    """Keeps the weights of the epoch with the greatest step skill, and says when to stop.

    Args:
        module: The estimator that is trained.
        patience: Epochs in a row whose skill lies under the best before it is time to stop; None:
            never, and the last weights stay.
        measure: The skill as it is now; None where it cannot be measured.
    """

    def __init__(
        self,
        module: EstimatorModule,
        patience: int | None,
        measure: Callable[[], float | None],
    ) -> None:
        self.module, self.patience, self.measure = module, patience, measure
        self.best, self.under = -math.inf, 0
        self.weights: list[Tensor] = []

    def is_over(self) -> bool:
        """Note the skill after an epoch; True if no better one is to be waited for."""
        if self.patience is None or (skill := self.measure()) is None:
            return False
        if skill < self.best:
            self.under += 1
        else:
            self.best, self.under = skill, 0
            self.weights = [p.detach().clone() for p in self.module.parameters()]
        return self.under >= self.patience

    @torch.no_grad()
    def restore(self) -> None:
        """Give the module the weights of the best epoch."""
        for parameter, best in zip(self.module.parameters(), self.weights):
            parameter.copy_(best)

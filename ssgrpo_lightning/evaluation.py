"""Held-out problems: one completion of each, and the share that is solved."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import lightning as L

from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import RolloutEngine, Sampling
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.metrics import Accuracy
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.records import Problem, Rollouts
from ssgrpo_lightning.rollouts import Judge, collect
from ssgrpo_lightning.sharding import whole


class Evaluation(L.LightningModule):
    """The half of a training module that ``validate`` and ``test`` need."""

    policy: PolicyModule
    estimator: EstimatorModule | None
    engine: RolloutEngine
    policy_step: int
    seed: int

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy()

    @property
    def datamodule(self) -> RolloutDataModule:
        """The DataModule that owns problems, judge and buffer."""
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        judge: Judge | None = None,
        replica: int = 0,
    ) -> Rollouts:
        """Sample groups from the policy as it is now, verify them and cut them into steps.

        Args:
            problems: One group of each.
            group_size: Rollouts of a group.
            sampling: How they are drawn.
            judge: What verifies them; None: that of training.
            replica: Number from which the noise of an update counts its rollouts.
        """
        assert self.policy.policy is not None
        with self.whole():
            return collect(
                self.policy.policy,
                self.engine,
                judge or self.datamodule.judge,
                problems,
                group_size,
                sampling,
                self.seed,
                self.policy_step,
                replica,
            )

    def whole(self) -> AbstractContextManager[None]:
        """Hold whole what rolling out and scoring read. Every rank has to enter; see `sharding`."""
        estimator = self.estimator
        scores = estimator is not None and estimator.estimator.reads_policy
        samples = not self.engine.keeps_copy
        return whole(self.policy.policy if samples or scores else None, estimator)

    def evaluate(self, problems: Sequence[Problem]) -> Rollouts:
        """One completion of every problem, drawn and judged as in validation and test."""
        judge = self.datamodule.evaluation_judge
        return self.collect(problems, 1, self.policy.evaluation, judge)

    def validation_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One completion of every held-out problem."""
        rollouts = self.evaluate(problems)
        self.accuracy.update(rollouts.rewards)
        size = len(rollouts)
        self.log("val/reward", rollouts.rewards.nan_to_num().mean(), batch_size=size)
        self.log("val/mean_length", rollouts.completion_lengths.float().mean(), batch_size=size)
        self.log("val/clipped_ratio", rollouts.truncated.float().mean(), batch_size=size)

    def on_validation_epoch_end(self) -> None:
        self.log("val/accuracy", self.accuracy.compute()["accuracy"], prog_bar=True)
        self.log("policy_step", float(self.policy_step))
        self.accuracy.reset()

    def test_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One completion of every test problem."""
        self.accuracy.update(self.evaluate(problems).rewards)

    def on_test_epoch_end(self) -> None:
        result = self.accuracy.compute()
        self.log_dict({"test/accuracy": result["accuracy"], "policy_step": float(self.policy_step)})
        self.log_dict({"test/accuracy_low": result["low"], "test/accuracy_high": result["high"]})
        self.accuracy.reset()

"""The algorithm: two modules that alternate under one Trainer.

Left out of this file on purpose: how rollouts are sampled (`rollouts`), what a step is worth
(`credit`, `objectives`), what a token's loss is (`losses`), and everything about ranks (`parallel`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning import parallel
from ssgrpo_lightning.credit import CreditRule, ValueGain, outcome_scores
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import RolloutEngine, Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.functional import spread_steps
from ssgrpo_lightning.metrics import Accuracy, Sums, credit_sums, mean_of, rollout_sums
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.records import CreditedRollouts, Problem, Rollouts, StepScores
from ssgrpo_lightning.rollouts import collect, micro_batches, whole_groups

PHASES = ("rollout", "score", "policy", "estimator")


class SSGRPO(L.LightningModule):
    """Step-Sparse GRPO: a policy and a step-value estimator that learn from the same rollouts.

    One ``training_step`` is one update: one batch of problems, one ``policy_step``. That is what
    ``max_steps``, checkpoints and loggers count.

    Args:
        policy: The language model and its loss.
        estimator: The step-value estimator; null where the credit rule needs no values.
        credit: How step values bend the group advantage; `Broadcast` is plain GRPO.
        engine: What samples the rollouts.
        scale_rewards: Deviation that divides the group advantage.
        inner_epochs: Passes of the policy phase over the rollouts of an update (mu).
        minibatches: Optimiser steps of one such pass.
        estimator_every: Policy updates between two estimator phases; the first has one.
        estimator_epochs: Passes of an estimator phase over the rollouts since the last one.
        seed: Seed of rollout noise and of the split into minibatches.
    """

    def __init__(
        self,
        policy: PolicyModule,
        estimator: EstimatorModule | None = None,
        credit: CreditRule = ValueGain(),  # noqa: B008 (frozen)
        engine: RolloutEngine = TransformersEngine(),  # noqa: B008
        scale_rewards: Literal["group", "batch", "none"] = "group",
        inner_epochs: int = 1,
        minibatches: int = 1,
        estimator_every: int = 1,
        estimator_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        counts = {
            "inner_epochs": inner_epochs,
            "minibatches": minibatches,
            "estimator_every": estimator_every,
            "estimator_epochs": estimator_epochs,
        }
        for field, value in counts.items():
            if value < 1:
                raise ValueError(f"model.{field} is {value}, must be at least 1")
        if credit.needs_values and estimator is None:
            raise ValueError(
                f"model.credit is {type(credit).__name__}, which needs step values, but "
                "model.estimator is null: add an estimator, or use Broadcast for plain GRPO"
            )
        self.automatic_optimization = False
        self.policy, self.credit, self.engine = policy, credit, engine
        self.estimator = estimator if credit.needs_values else None
        self.scale_rewards: Literal["group", "batch", "none"] = scale_rewards
        self.inner_epochs, self.minibatches = inner_epochs, minibatches
        self.estimator_every, self.estimator_epochs = estimator_every, estimator_epochs
        self.seed = seed
        self.policy_step, self.num_tokens = 0, 0
        self.seconds: dict[str, float] = {}
        self.accuracy = Accuracy()

    # --- the algorithm -------------------------------------------------------------------------

    def training_step(self, problems: list[Problem], batch_idx: int) -> dict[str, Any]:
        """One update. The mapping it returns reaches the callbacks as ``outputs``."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        with self.phase("rollout"):
            rollouts = self.collect(problems, self.datamodule.group_size, self.policy.sampling)
        with self.phase("score"):
            scores = self.score(rollouts)  # before the estimator has learnt from them
            step_advantages = self.credit(scores)
            advantages = spread_steps(step_advantages, rollouts.step)
        with self.phase("policy"):
            learnt = self.policy_phase(CreditedRollouts(rollouts, advantages))
        with self.phase("estimator"):
            learnt |= self.estimator_phase(rollouts)
        self.finish_update()
        weights = self.credit.weights(scores)
        metrics = self.log_update(rollouts, scores, weights, step_advantages, learnt)
        return {
            "rollouts": rollouts,
            "scores": scores,
            "weights": weights,
            "step_advantages": step_advantages,
            "metrics": metrics,
        }

    def collect(self, problems: Sequence[Problem], group_size: int, sampling: Sampling) -> Rollouts:
        """Sample groups from the policy as it is now, verify them and cut them into steps."""
        assert self.policy.policy is not None
        return collect(
            self.policy.policy,
            self.engine,
            self.datamodule.judge,
            problems,
            group_size,
            sampling,
            self.seed,
            self.policy_step,
        )

    def score(self, rollouts: Rollouts) -> StepScores:
        """What the outcomes, and the estimator where there is one, say about every step."""
        outcomes = outcome_scores(rollouts, self.scale_rewards)
        return outcomes if self.estimator is None else self.estimator.score(rollouts, outcomes)

    def policy_phase(self, batch: CreditedRollouts) -> dict[str, Tensor]:
        """Train the policy: `inner_epochs` passes of `minibatches` optimiser steps each."""
        policy = self.policy
        optimizer = self._optimizers()[0]
        if self.inner_epochs * self.minibatches > 1:
            old = policy.logprobs(batch.rollouts)
            batch = CreditedRollouts(batch.rollouts, batch.advantages, old)
        sums: dict[str, Tensor] = {}
        norms = []
        for epoch in range(self.inner_epochs):
            for rows in self._minibatch_rows(batch.rollouts, epoch):
                live, dead = self._split_rows(batch, rows)
                mask = policy.learnt(batch.rollouts)
                divisor = torch.stack([policy.reduction.count(mask[m]) for m in live + dead]).sum()
                divisor = parallel.global_sum(self, divisor).clamp(min=1)
                parts = [batch.select(m) for m in live]
                losses = [lambda part=part: policy.loss(part, divisor) for part in parts]
                norms += self._optimise(optimizer, policy.parameters(), losses, sums, policy)
        return self._policy_metrics(sums, norms)

    def estimator_phase(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Train the estimator on the groups since its last phase, every `estimator_every` updates."""
        if self.estimator is None:
            return {}
        self.datamodule.store(rollouts, keep=self.estimator_every)
        if self.policy_step % self.estimator_every:
            return {}
        estimator, optimizer = self.estimator, self._optimizers()[-1]
        sums: dict[str, Tensor] = {}
        norms = []
        for _ in range(self.estimator_epochs):
            for stored in self.datamodule.buffer:
                divisor = parallel.global_sum(self, estimator.learnable(stored))
                parts = [
                    stored.select(rows)
                    for rows in whole_groups(stored, estimator.micro_batch_groups)
                    if bool(estimator.learnable(stored.select(rows)))
                ]
                losses = [lambda p=part, d=divisor: self._estimator_loss(p, d) for part in parts]
                norms += self._optimise(optimizer, estimator.parameters(), losses, sums, estimator)
        count = max(len(norms), 1)
        self.datamodule.buffer.clear()
        return {
            "estimator/loss": sums.get("estimator/loss", torch.zeros(())) / count,
            "estimator/grad_norm": torch.stack(norms).mean() if norms else torch.zeros(()),
        }

    def finish_update(self) -> None:
        """Move schedules and counters on."""
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()  # pyright: ignore[reportCallIssue]
        self.policy_step += 1
        parallel.count_update(self)

    # --- optimisation --------------------------------------------------------------------------

    def _optimise(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterator[torch.nn.Parameter],
        losses: Sequence[Callable[[], tuple[Tensor, dict[str, Tensor]]]],
        sums: dict[str, Tensor],
        module: PolicyModule | EstimatorModule,
    ) -> list[Tensor]:
        """One optimiser step over micro-batches; none, on any rank, where no rank has one."""
        if not float(parallel.global_sum(self, torch.tensor(float(len(losses))).to(self.device))):
            return []
        optimizer.zero_grad()
        for index, loss in enumerate(losses):
            with parallel.only_last_syncs(self, last=index + 1 == len(losses)):
                value, parts = loss()
                # DDP averages over ranks, and the divisor already counts them all.
                self.manual_backward(value * self.trainer.world_size)
            for name, part in parts.items():
                sums[name] = sums.get(name, 0) + part.detach()
        limit = float("inf") if module.max_grad_norm is None else module.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(list(parameters), limit)
        optimizer.step()
        return [norm.detach()]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The plain optimisers: the policy's first, the estimator's last."""
        optimizers = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]  # pyright: ignore

    def _minibatch_rows(self, rollouts: Rollouts, epoch: int) -> list[Tensor]:
        """Rows of each optimiser step of a pass: whole groups, in an order of this pass's own."""
        groups = rollouts.group.unique()
        if self.minibatches == 1:
            return [torch.arange(len(rollouts), device=groups.device)]
        generator = parallel.rank_generator(self.seed, self.policy_step, epoch)
        order = torch.randperm(len(groups), generator=generator).to(groups.device)
        parts = groups[order].tensor_split(self.minibatches)
        return [torch.isin(rollouts.group, part).nonzero()[:, 0] for part in parts]

    def _split_rows(
        self, batch: CreditedRollouts, rows: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Micro-batches of rows that have a gradient, and of rows that only count in the divisor.

        A rollout without advantage teaches nothing, so it is spared the forward pass; with
        beta > 0 it still holds the policy to its reference, dead group or not.
        """
        live = (batch.advantages[rows] != 0).any(1)
        if self.policy.beta > 0:
            live = ~batch.rollouts.rewards[rows].isnan() & batch.rollouts.sampled[rows].any(1)
        size = self.policy.micro_batch
        return (
            micro_batches(batch.rollouts, rows[live], size) if bool(live.any()) else [],
            micro_batches(batch.rollouts, rows[~live], size) if not bool(live.all()) else [],
        )

    def _estimator_loss(self, part: Rollouts, divisor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.estimator is not None
        loss = self.estimator.loss(part, divisor)
        return loss, {"estimator/loss": loss}

    # --- logging -------------------------------------------------------------------------------

    def _policy_metrics(
        self, sums: dict[str, Tensor], norms: list[Tensor]
    ) -> dict[str, Tensor]:
        """Means over trained tokens; 0 where nothing was trained, so that keys never change."""
        zero = torch.zeros((), device=self.device)
        names = ["sampling/sampling_logp_difference/mean"]
        names += list(self.policy.surrogate.watch(*[torch.zeros(1, 1)] * 3))
        names += ["kl"] if self.policy.beta > 0 else []
        tokens = parallel.global_sum(self, sums.get("tokens", zero)).clamp(min=1)
        means = {n: parallel.global_sum(self, sums.get(n, zero)) / tokens for n in names}
        steps = max(len(norms), 1)
        return means | {
            "policy_loss": parallel.global_sum(self, sums.get("policy_loss", zero)) / steps,
            "grad_norm": torch.stack(norms).mean() if norms else zero,
        }

    def log_update(
        self,
        rollouts: Rollouts,
        scores: StepScores,
        weights: Float[Tensor, "rollout step"],
        step_advantages: Float[Tensor, "rollout step"],
        learnt: dict[str, Tensor],
    ) -> dict[str, float]:
        """One row for the loggers; a metric stands in it only if this update measured it."""
        sums: Sums = rollout_sums(rollouts)
        sums |= credit_sums(rollouts, scores, weights, step_advantages)
        metrics = {}
        for name, (total, count) in sums.items():
            both = parallel.global_sum(self, torch.stack([total, count.to(total)]).to(self.device))
            metrics[name] = float(both[0] / both[1]) if both[1] else 0.0
        lengths = rollouts.completion_lengths.float()
        metrics["completions/max_length"] = float(parallel.global_max(self, lengths.max()))
        metrics["completions/min_length"] = -float(parallel.global_max(self, (-lengths).max()))
        self.num_tokens += int(parallel.global_sum(self, rollouts.attended.sum()))
        optimizers = self._optimizers()
        seconds = {f"timing/{name}": value for name, value in self.seconds.items()}
        total = max(sum(self.seconds.values()), 1e-9)
        metrics |= {name: float(value) for name, value in learnt.items()} | seconds | {
            "policy_step": self.policy_step,
            "num_tokens": self.num_tokens,
            "learning_rate": optimizers[0].param_groups[0]["lr"],
            "step/gate": self.credit.gate,
            "timing/update": total,
            "timing/estimator_frac": (self.seconds["score"] + self.seconds["estimator"]) / total,
        }
        if self.estimator is not None:
            metrics["estimator/learning_rate"] = optimizers[-1].param_groups[0]["lr"]
        if self.policy_step % self.trainer.log_every_n_steps == 0:
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.policy_step)
        # The bar, checkpoints and early stopping read these; the loggers have their row.
        shown = {"reward", "entropy"}
        for name, value in metrics.items():
            self.log(name, float(value), prog_bar=name in shown, logger=False, batch_size=1)
        return metrics

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the update and tell the callbacks that ask."""
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(callback, "on_phase_start"):
                callback.on_phase_start(self.trainer, self, name)
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    # --- evaluation ----------------------------------------------------------------------------

    def validation_step(self, problems: list[Problem], batch_idx: int) -> None:
        """One completion of every held-out problem."""
        rollouts = self.collect(problems, 1, self.policy.evaluation)
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
        self.accuracy.update(self.collect(problems, 1, self.policy.evaluation).rewards)

    def on_test_epoch_end(self) -> None:
        result = self.accuracy.compute()
        self.log_dict({"test/accuracy": result["accuracy"], "policy_step": float(self.policy_step)})
        self.log_dict({"test/accuracy_low": result["low"], "test/accuracy_high": result["high"]})
        self.accuracy.reset()

    def predict_step(self, problems: list[Problem], batch_idx: int) -> dict[str, Any]:
        """Grouped rollouts with scores and credit; a callback writes them down."""
        rollouts = self.collect(problems, self.datamodule.group_size, self.policy.sampling)
        scores = self.score(rollouts)
        return {
            "rollouts": rollouts,
            "scores": scores,
            "weights": self.credit.weights(scores),
            "step_advantages": self.credit(scores),
        }

    # --- Lightning -----------------------------------------------------------------------------

    @property
    def datamodule(self) -> RolloutDataModule:
        """The DataModule that owns problems, judge and buffer."""
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    def setup(self, stage: str) -> None:
        """Check what can be checked before any weights load."""
        if not isinstance(self.datamodule, RolloutDataModule):
            raise ValueError(
                f"data is {type(self.datamodule).__name__}, must be a RolloutDataModule: SSGRPO "
                "samples its rollouts; stored ones fit an EstimatorModule alone"
            )
        parallel.refuse_unsupported(self)
        self.policy.check({k: list(v) for k, v in self.datamodule.problems.items()})

    def configure_model(self) -> None:
        # Lightning calls the hooks of the root only.
        self.policy.configure_model()

    def configure_optimizers(self) -> Any:
        children = [self.policy] + ([] if self.estimator is None else [self.estimator])
        return [child.configure_optimizers() for child in children]

    def on_train_start(self) -> None:
        """Validate before the first update, so that every curve has its start."""
        if self.policy_step == 0 and self.trainer.val_dataloaders is not None:
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ssgrpo"] = {"policy_step": self.policy_step, "num_tokens": self.num_tokens}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.policy_step = checkpoint["ssgrpo"]["policy_step"]
        self.num_tokens = checkpoint["ssgrpo"]["num_tokens"]

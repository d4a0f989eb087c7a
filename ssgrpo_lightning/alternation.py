"""The algorithm: two modules that alternate under one Trainer.

Left out of this file on purpose: how rollouts are sampled (`rollouts`), what a step is worth
(`credit`, `objectives`), what a token's loss is (`losses`), and all about ranks (`parallel`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning import parallel
from ssgrpo_lightning.advantages import Advantage, GroupRelative, outcomes_of
from ssgrpo_lightning.collection import Collection, OneBatch
from ssgrpo_lightning.credit import CreditRule, ValueGain, outcome_scores
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import RolloutEngine, Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import BestEpoch, EstimatorModule
from ssgrpo_lightning.evaluation import Evaluation
from ssgrpo_lightning.functional import counted_generator
from ssgrpo_lightning.gating import FixedGate, Gate, Watch
from ssgrpo_lightning.interventions import Intervened
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.policy_settings import check_prompts
from ssgrpo_lightning.probing import Probe, note_skill, step_skill
from ssgrpo_lightning.records import CreditedRollouts, Problem, Rollouts, ScoredRollouts, StepScores
from ssgrpo_lightning.reporting import log_row, prediction_rows, update_row
from ssgrpo_lightning.rollouts import Resampler, minibatches, whole_groups
from ssgrpo_lightning.settings import check_settings
from ssgrpo_lightning.shaping import Shaping
from ssgrpo_lightning.temperature import FixedTemperature, Temperature

PHASES = ("rollout", "score", "policy", "estimator")


class SSGRPO(Evaluation):
    """Step-Sparse GRPO: a policy and a step-value estimator that learn from the same rollouts.

    One ``training_step`` is one update: one batch of problems, one ``policy_step``. That is what
    ``max_steps``, checkpoints and loggers count.

    Args:
        policy: The language model and its loss.
        estimator: The step-value estimator; null where the credit rule needs no values.
        credit: How step values bend the group advantage; `Broadcast` is plain GRPO.
        engine: What samples the rollouts.
        collection: Which groups make up an update.
        temperature: How hot they are sampled in each update.
        shaping: What rollouts lose before advantages are made, one after the other; null: nothing.
        advantage: How the rewards of a group become the advantage of each rollout.
        inner_epochs: Passes of the policy phase over the rollouts of an update (mu).
        minibatches: Optimiser steps of one such pass.
        estimator_every: Policy updates between two estimator phases; the first has one.
        estimator_epochs: Passes of an estimator phase over the rollouts since the last one.
        estimator_patience: Passes in a row whose step skill lies under the best after which a phase
            stops; the weights of the best pass stay. Null: all are made, the last weights stay.
        gate: How much of the rule's own gate acts.
        probe: When and how the step skill of the estimator is measured.
        warmup_updates: First updates in which the estimator learns and the policy does not, as the
            value pretraining of VAPO (2504.05118). They count as updates in everything else:
            `max_steps`, schedules, sampling.
        seed: Seed of rollout noise and of the split into minibatches.
    """

    def __init__(
        self,
        policy: PolicyModule,
        estimator: EstimatorModule | None = None,
        credit: CreditRule = ValueGain(),
        engine: RolloutEngine = TransformersEngine(),
        collection: Collection = OneBatch(),
        temperature: Temperature = FixedTemperature(),
        shaping: list[Shaping] | None = None,
        advantage: Advantage = GroupRelative(),
        inner_epochs: int = 1,
        minibatches: int = 1,
        estimator_every: int = 1,
        estimator_epochs: int = 1,
        estimator_patience: int | None = None,
        gate: Gate = FixedGate(),
        probe: Probe = Probe(),
        warmup_updates: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.credit, self.engine = policy, credit, engine
        self.estimator = estimator if credit.needs_values else None
        self.collection, self.temperature = collection, temperature
        self.heat = temperature(policy.sampling.temperature, 0)  # of the next update
        self.shaping, self.advantage = shaping or [], advantage
        self.inner_epochs, self.minibatches = inner_epochs, minibatches
        self.estimator_every, self.estimator_epochs = estimator_every, estimator_epochs
        self.estimator_patience, self.gate, self.probe = estimator_patience, gate, probe
        self.watch, self.resample = Watch(), None
        self.was_open: bool | None = None  # until a gate has acted
        self.warmup_updates, self.seed = warmup_updates, seed
        self.ready = False
        self.policy_step, self.num_tokens = 0, 0
        self.seconds: dict[str, float] = {}
        check_settings(self, estimator)

    # --- the algorithm -------------------------------------------------------------------------

    def training_step(self, problems: list[Problem], batch_idx: int) -> dict[str, Any]:
        """One update. The mapping it returns reaches the callbacks as ``outputs``."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        with self.whole():
            with self.phase("rollout"):
                rollouts, drawn = self.collection(self, problems)
                rollouts = self.policy.referred(rollouts)
            with self.phase("score"):
                rollouts = self.shaped(rollouts)
                if self.resample is not None:
                    self.resample.sampling = self.sampling
                # Before the estimator has learnt from them.
                scores = self.score(rollouts, self.advantages(rollouts))
                probe = self.probe(self, rollouts)
                skill = note_skill(self, probe)
                step_advantages = self.rule(scores)
        with self.phase("policy"):
            learnt = self.policy_phase(parallel.credited(self, rollouts, step_advantages))
        with self.phase("estimator"):
            learnt |= self.estimator_phase(ScoredRollouts(rollouts, scores), probe) | skill | drawn
        self.finish_update()
        weights = self.credit.weights(scores)
        metrics = update_row(self, rollouts, scores, weights, step_advantages, learnt)
        log_row(self, metrics)
        self.watch = self.gate.follow(self.watch, metrics)
        self.heat = self.next_temperature(metrics)
        return {
            "rollouts": rollouts,
            "scores": scores,
            "weights": weights,
            "step_advantages": step_advantages,
            "metrics": metrics,
        }

    @property
    def sampling(self) -> Sampling:
        """How rollouts of training are drawn now."""
        return replace(self.policy.sampling, temperature=self.heat)

    def next_temperature(self, metrics: Mapping[str, float]) -> float:
        """Temperature of the next update, after one that measured `metrics`."""
        distinct = metrics["group/distinct_completions"] / self.datamodule.group_size
        usual = self.policy.sampling.temperature
        return self.temperature(usual, self.policy_step, self.heat, distinct)

    def shaped(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the penalties and masks of every shaping."""
        for shaping in self.shaping:
            rollouts = shaping(rollouts)
        return rollouts

    def advantages(self, rollouts: Rollouts) -> Float[Tensor, " rollout"]:
        """Advantage of each rollout; what it reads of the batch, it reads of all ranks."""
        everyone, own = parallel.everyones(self, outcomes_of(rollouts))
        return self.advantage(everyone)[own]

    def score(
        self, rollouts: Rollouts, advantages: Float[Tensor, " rollout"] | None = None
    ) -> StepScores:
        """What the outcomes, and the estimator where there is one, say about every step.

        Args:
            rollouts: The rollouts.
            advantages: Advantage of each; None: as these rollouts alone give them.
        """
        if advantages is None:
            advantages = self.advantage(outcomes_of(rollouts))
        outcomes = outcome_scores(rollouts, advantages)
        if self.estimator is None:
            return outcomes
        with self.whole():
            return self.estimator.score(rollouts, outcomes)

    @property
    def rule(self) -> CreditRule:
        """The credit rule with as much of its gate as acts now."""
        skill = 0.0 if self.estimator is None else self.estimator.mean_skill
        return self.gate.acting(self.credit, skill, self.watch)

    def policy_phase(self, batch: CreditedRollouts) -> dict[str, Tensor]:
        """Train the policy: `inner_epochs` passes of `minibatches` optimiser steps each."""
        policy, rollouts = self.policy, batch.rollouts
        if self.policy_step < self.warmup_updates:
            return policy.metrics({})
        batch = policy.focused(batch, partial(parallel.pooled, self))
        mask, learns = policy.learnt(rollouts), policy.learns(batch)
        groups, no_tokens = int(parallel.global_max(self, rollouts.group.max())) + 1, mask.sum() * 0
        # Rows without a gradient are spared the forward pass, but count in the divisor.
        steps = [
            tuple(policy.micro_batches(rollouts, part) for part in (live, idle))
            for epoch in range(self.inner_epochs)
            for rows in minibatches(
                rollouts.group, groups, self.minibatches, self._generator(epoch)
            )
            for live, idle in [(rows[learns[rows]], rows[~learns[rows]])]
        ]
        if len(steps) > 1:
            first_pass = [rows for live, _ in steps[: self.minibatches] for rows in live]
            batch = replace(batch, old=policy.logprobs(rollouts, first_pass))
        optimizer, tally = self.optimizers_by_name()["policy"], parallel.Tally()
        for live, idle in steps:
            # A rank may have nothing of a small minibatch.
            counts = [policy.reduction.count(mask[rows]) for rows in live + idle] or [no_tokens]
            divisor = parallel.global_sum(self, torch.stack(counts).sum()).clamp(min=1)
            losses = [partial(policy.loss, batch.select(rows), divisor) for rows in live]
            with parallel.optimiser_state_on(self.device, optimizer, policy.offload_optimizer):
                parallel.optimiser_step(self, policy, optimizer, losses, tally)
        means = tally.means(self, "tokens")
        learnt = policy.metrics(means)
        assert policy.policy is not None
        policy.anchor.follow(policy.policy, self.policy_step + 1, means.get("kl"))
        return learnt

    def estimator_phase(self, batch: ScoredRollouts, probe: Intervened | None) -> dict[str, Tensor]:
        """Train the estimator on the groups since its last phase, if it is due."""
        if self.estimator is None or not self.estimator.learns:
            return {}
        self.datamodule.store(batch, keep=self.estimator_every)
        if self.policy_step % self.estimator_every:
            return {}
        estimator = self.estimator
        optimizer, tally = self.optimizers_by_name()["estimator"], parallel.Tally()
        measure = partial(step_skill, self, probe)
        best = BestEpoch(estimator, self.estimator_patience, measure)
        for _ in range(self.estimator_epochs):
            for stored in self.datamodule.buffer:
                kept = stored.select(estimator.learnable(stored.rollouts).nonzero()[:, 0])
                count = torch.tensor(float(len(kept.rollouts))).to(self.device)
                divisor = parallel.global_sum(self, count)
                parts = whole_groups(kept.rollouts, estimator.micro_batch_groups)
                losses = [partial(estimator.loss, kept.select(r), divisor) for r in parts]
                parallel.optimiser_step(self, estimator, optimizer, losses, tally)
            if best.is_over():
                break
        best.restore()
        self.datamodule.buffer.clear()
        means = tally.means(self, "steps")
        return {f"estimator/{name}": means[name] for name in ("loss", "grad_norm") if name in means}

    def finish_update(self) -> None:
        """Move schedules and counters on."""
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()  # pyright: ignore[reportCallIssue]
        self.policy_step += 1
        parallel.count_update(self)

    def _generator(self, epoch: int) -> torch.Generator:
        """Randomness of the split of one pass into minibatches."""
        return counted_generator(self.seed, self.policy_step, epoch)

    def optimizers_by_name(self) -> dict[str, torch.optim.Optimizer]:
        """The plain optimisers of the children, without Lightning's step counter around them."""
        found = self.optimizers(use_pl_optimizer=False)
        names = ("policy", "estimator")
        return dict(zip(names, found if isinstance(found, list) else [found]))  # pyright: ignore

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the update and tell the callbacks that ask."""
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(callback, "on_phase_start"):
                callback.on_phase_start(self.trainer, self, name)
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def predict_step(self, problems: list[Problem], batch_idx: int) -> list[dict[str, Any]]:
        """Grouped rollouts, one JSON-ready row each, with the credit of every step."""
        rollouts = self.collect(problems, self.datamodule.group_size, self.sampling)
        rollouts = self.shaped(rollouts)
        return prediction_rows(self, rollouts, self.score(rollouts))

    # --- Lightning -----------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check what can be checked before any weights load."""
        if not isinstance(self.datamodule, RolloutDataModule):
            raise ValueError(
                f"data is {type(self.datamodule).__name__}, must be a RolloutDataModule: SSGRPO "
                "samples its rollouts; stored ones fit an EstimatorModule alone"
            )
        parallel.refuse_unsupported(self.trainer.strategy)
        check_prompts(self.policy, self.datamodule.problems)

    def configure_model(self) -> None:
        # Lightning calls the hooks of the root only.
        self.ready = True
        self.policy.configure_model()
        policy = self.policy.policy
        if self.estimator is not None and policy is not None:
            self.estimator.configure_model()
            judge = self.datamodule.judge
            self.resample = Resampler(policy, self.engine, judge, self.sampling, self.seed)
            self.estimator.estimator.bind(policy, self.resample)
            if self.warmup_updates and not self.estimator.learns:
                raise ValueError(
                    f"model.warmup_updates is {self.warmup_updates}, but "
                    f"{type(self.estimator.estimator).__name__} has nothing to learn: set it to 0"
                )
        parallel.shard(self)

    def teardown(self, stage: str) -> None:
        if self.policy.policy is not None:
            self.engine.close(self.policy.policy)

    def configure_optimizers(self) -> Any:
        found = [self.policy.configure_optimizers()]
        if self.estimator is not None and self.estimator.learns:
            found.append(self.estimator.configure_optimizers())
        return found

    def on_train_start(self) -> None:
        """Validate before the first update, so that every curve has its start."""
        if self.policy_step == 0 and self.trainer.val_dataloaders is not None:
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ssgrpo"] = {
            "policy_step": self.policy_step,
            "num_tokens": self.num_tokens,
            "watch": asdict(self.watch),
            "temperature": self.heat,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.policy_step = checkpoint["ssgrpo"]["policy_step"]
        self.num_tokens = checkpoint["ssgrpo"]["num_tokens"]
        self.watch = Watch(**checkpoint["ssgrpo"].get("watch", {}))
        self.heat = checkpoint["ssgrpo"].get("temperature", self.heat)

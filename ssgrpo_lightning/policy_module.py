"""The policy as a LightningModule: its network, its loss, its optimiser. Knows no rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from ssgrpo_lightning.engines import Sampling
from ssgrpo_lightning.functional import top_threshold
from ssgrpo_lightning.layout import Layout, SharedPrompt, micro_batches
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.losses import (
    BetaControl,
    ClippedSurrogate,
    Correction,
    Dapo,
    FixedBeta,
    KlInLoss,
    KlTerm,
    NoCorrection,
    Reduction,
    Surrogate,
)
from ssgrpo_lightning.policy import Policy, Pretrained
from ssgrpo_lightning.policy_settings import check_settings
from ssgrpo_lightning.records import CreditedRollouts, Rollouts
from ssgrpo_lightning.references import Anchor, FrozenCopy, Reference
from ssgrpo_lightning.rollouts import Rows
from ssgrpo_lightning.schedules import with_schedule
from ssgrpo_lightning.sharding import whole

RATIO = "sampling/importance_sampling_ratio"


class PolicyModule(L.LightningModule):
    """Owns the language model and says what its loss on a micro-batch of rollouts is.

    Args:
        optimizer: Optimiser of the policy.
        model: Which language model to start from.
        lr_scheduler: Learning-rate schedule, one step per update; null: constant.
        sampling: How rollouts are drawn in training.
        evaluation: How completions are drawn in validation and test; null: greedily, with the
            budget and stop strings of `sampling`.
        max_prompt_tokens: Longest prompt allowed; a longer one is refused, never cut.
        surrogate: Loss of a token.
        reduction: How token losses become one number.
        correction: Weight of tokens by the gap between the engine's and our log-probabilities.
        entropy_bonus: Reward for the entropy of the policy at its sampled tokens, in losses per
            nat; weighted like the losses of tokens, never by step weights.
        top_entropy: Share of tokens, those sampled at the highest entropy, that have an advantage;
            that of the others is 0, the divisor stays. Over all ranks and the whole update.
            2506.01939 found 0.2 to be enough; 1: all.
        beta: Weight of the KL divergence to the reference, in losses or rewards per nat; 0 loads no
            reference.
        beta_control: How that weight moves from update to update.
        kl: Where the KL acts, and how it is estimated.
        reference: What the KL holds the policy to.
        micro_batch: Most rollouts of one forward and backward pass.
        micro_batch_tokens: Most tokens of one pass; a longer rollout goes alone. Null: any.
        layout: How a micro-batch is laid out for the decoder.
        lora: Adapter to train instead of the weights; null: train the weights.
        max_grad_norm: Gradients are clipped to this global norm; null: never.
        head_chunk: Tokens whose logits exist at one time.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.
        offload_optimizer: Keep the optimiser's state on the CPU while the policy is not trained.
        compile: Compile the policy's training forward: minutes once, worth it on a GPU.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable,
        model: Pretrained = Pretrained(),
        lr_scheduler: LRSchedulerCallable | None = None,
        sampling: Sampling = Sampling(),
        evaluation: Sampling | None = None,
        max_prompt_tokens: int = 512,
        surrogate: Surrogate = ClippedSurrogate(),
        reduction: Reduction = Dapo(),
        correction: Correction = NoCorrection(),
        entropy_bonus: float = 0.0,
        top_entropy: float = 1.0,
        beta: float = 0.0,
        beta_control: BetaControl = FixedBeta(),
        kl: KlTerm = KlInLoss(),
        reference: Reference = FrozenCopy(),
        micro_batch: int = 64,
        micro_batch_tokens: int | None = None,
        layout: Layout = SharedPrompt(),
        lora: Lora | None = None,
        max_grad_norm: float | None = 1.0,
        head_chunk: int = 1024,
        gradient_checkpointing: bool = False,
        offload_optimizer: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.sampling = model, sampling
        self.anchor = Anchor(beta, beta_control, kl, reference)
        self.correction = correction
        self.entropy_bonus, self.top_entropy = entropy_bonus, top_entropy
        self.evaluation = evaluation or replace(sampling, temperature=0.0)
        self.max_prompt_tokens, self.micro_batch = max_prompt_tokens, micro_batch
        self.micro_batch_tokens, self.layout, self.lora = micro_batch_tokens, layout, lora
        self.surrogate, self.reduction = surrogate, reduction
        self.max_grad_norm = max_grad_norm
        self.head_chunk, self.gradient_checkpointing = head_chunk, gradient_checkpointing
        self.offload_optimizer, self.compile_policy = offload_optimizer, compile
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.policy: Policy | None = None
        check_settings(self)

    def configure_model(self) -> None:
        if self.policy is None:
            load = partial(self.model.load, self.head_chunk, layout=self.layout)
            self.policy = load(
                gradient_checkpointing=self.gradient_checkpointing,
                lora=self.lora,
                compile=self.compile_policy,
            )
            self.anchor.load(load)

    def configure_optimizers(self) -> Any:
        return with_schedule(self.optimizer, self.lr_scheduler, self.parameters(), "lr/policy")

    def micro_batches(self, rollouts: Rollouts, rows: Rows) -> list[Rows]:
        """Rows of each forward and backward pass over the given ones."""
        limits = self.micro_batch, self.micro_batch_tokens
        return micro_batches(rollouts, rows, self.layout, *limits)

    def logprobs(
        self, rollouts: Rollouts, parts: Sequence[Rows], of: Policy | None = None
    ) -> Float[Tensor, "rollout token"]:
        """Log-probabilities of the sampled tokens as they are now, without gradient.

        0 in rollouts that no part names. Computed in the very micro-batches that train on them, so
        that the first ratio is exactly 1.

        Args:
            rollouts: The rollouts.
            parts: Their rows, by micro-batch.
            of: What reads them; None: the policy.
        """
        result = torch.zeros_like(rollouts.logprobs)
        with torch.no_grad(), whole(of or self.policy):
            for rows in parts:
                values, _ = self.forward(rollouts.select(rows), of)
                result[rows, rollouts.columns(rows)] = values
        return result

    @torch.no_grad()
    def reread(self, rollouts: Rollouts, rows: Rows) -> Rollouts:
        """The rollouts with what the policy says now to the tokens of the given ones.

        For rollouts that it did not sample as they are: log-probabilities, entropies, texts.
        """
        assert self.policy is not None
        logprobs, entropy = rollouts.logprobs.clone(), rollouts.entropy.clone()
        texts = list(rollouts.texts)
        with whole(self.policy):
            for part in self.micro_batches(rollouts, rows):
                span = rollouts.columns(part)
                logprobs[part, span], entropy[part, span] = self.forward(rollouts.select(part))
        for row in rows.tolist():
            ids = rollouts.tokens[row][rollouts.sampled[row]].tolist()
            texts[row] = self.policy.codec.decode(ids)
        return replace(rollouts, logprobs=logprobs, entropy=entropy, texts=tuple(texts))

    def forward(
        self, rollouts: Rollouts, of: Policy | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every sampled token, to the policy or to another."""
        policy = of or self.policy
        assert policy is not None
        return policy(
            rollouts.tokens,
            rollouts.attended,
            rollouts.sampled,
            rollouts.temperature,
            entropy_gradient=entropy_gradient,
        )

    def referred(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with what the reference says of them, where the KL has a weight."""
        if not self.anchor.beta:
            return rollouts
        assert self.policy is not None
        mask = self.learnt(rollouts)
        parts = self.micro_batches(rollouts, mask.any(1).nonzero()[:, 0])
        with self.anchor.reading(self.policy) as reference:
            logprobs = self.logprobs(rollouts, parts, reference)
        return self.anchor.penalised(rollouts, logprobs, mask)

    def focused(
        self, batch: CreditedRollouts, gathered: Callable[[Tensor], Tensor]
    ) -> CreditedRollouts:
        """The batch with advantages at the share `top_entropy` of tokens only.

        Args:
            batch: The rollouts of this rank.
            gathered: Collects numbers of all ranks.
        """
        if self.top_entropy == 1:
            return batch
        entropy = batch.rollouts.entropy
        least = top_threshold(gathered(entropy[self.learnt(batch.rollouts)]), self.top_entropy)
        return replace(batch, advantages=torch.where(entropy >= least, batch.advantages, 0.0))

    def learnt(self, rollouts: Rollouts) -> Bool[Tensor, "rollout token"]:
        """Tokens that count: sampled, in a rollout that has a return and is not masked.

        Numerator and denominator of every reduction use this one mask.
        """
        counts = ~rollouts.returns.isnan()
        if rollouts.masked is not None:
            counts &= ~rollouts.masked
        return rollouts.sampled & counts[:, None]

    def learns(self, batch: CreditedRollouts) -> Bool[Tensor, " rollout"]:
        """Rollouts whose loss has a gradient: those with an advantage.

        Every one with a verdict where an entropy bonus or a KL acts on dead groups too.
        """
        counts = self.learnt(batch.rollouts)
        if self.entropy_bonus > 0 or self.anchor.holds_dead:
            return counts.any(1)
        return (counts & (batch.advantages != 0)).any(1)

    def loss(
        self, batch: CreditedRollouts, divisor: Float[Tensor, ""]
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Loss of a micro-batch, and sums over its tokens for the log.

        Args:
            batch: The micro-batch.
            divisor: What the reduction counted over the whole optimiser step.
        """
        rollouts, advantages = batch.rollouts, batch.advantages
        logprobs, entropy = self.forward(rollouts, entropy_gradient=self.entropy_bonus > 0)
        old = logprobs.detach() if batch.old is None else batch.old
        mask = self.learnt(rollouts)
        seen = logprobs, old, advantages, mask
        ratio = self.correction.ratio(old - rollouts.logprobs, mask)
        losses = self.correction.weigh(ratio) * self.surrogate(*seen)
        losses = losses - self.entropy_bonus * entropy
        watched = {f"{RATIO}/mean": ratio}
        if rollouts.reference is not None:
            kl = self.anchor.kl.estimator(logprobs, old, rollouts.reference)
            losses = losses + self.anchor.losses(kl, advantages)
            watched["kl"] = kl
        loss = (self.reduction.weigh(mask) * losses).sum() / divisor
        with torch.no_grad():
            watched |= self.surrogate.watch(*seen)
            watched["sampling/sampling_logp_difference/mean"] = (logprobs - rollouts.logprobs).abs()
            sums = {name: torch.where(mask, x, 0).sum().float() for name, x in watched.items()}
            sums[f"{RATIO}/min"] = torch.where(mask, ratio, math.inf).min()
            sums[f"{RATIO}/max"] = torch.where(mask, ratio, -math.inf).max()
        return loss, {"tokens": mask.sum().float(), **sums}

    def idle(self) -> Tensor:
        """A pass that teaches nothing, while other ranks have more micro-batches: 0."""
        assert self.policy is not None
        return self.policy.idle()

    def metrics(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a policy phase measured, under TRL's names.

        0 where nothing was trained, so that the names never change.
        """
        names = ["sampling/sampling_logp_difference/mean"]
        names += [f"{RATIO}/{what}" for what in ("min", "mean", "max")]
        blank = torch.zeros(1, 1)
        names += list(self.surrogate.watch(blank, blank, blank, blank.bool()))
        names += ["kl"] if self.anchor.beta else []
        zero = torch.zeros(())
        return {name: means.get(name, zero) for name in names} | {
            "policy_loss": means.get("loss", zero),
            "grad_norm": means.get("grad_norm", zero),
            "beta": torch.tensor(self.anchor.beta),
        }

"""Policy losses, as two swap points that combine freely.

A surrogate says what a token's loss is, a reduction how tokens become one number.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssgrpo_lightning.functional import clipped_surrogate

PerToken = Float[Tensor, "rollout token"]
TokenMask = Bool[Tensor, "rollout token"]


class Surrogate(ABC):
    """Loss of each token, given its advantage."""

    @abstractmethod
    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        """Loss per token.

        Args:
            logprobs: Log-probabilities as they are now; the only argument with a gradient.
            old: Those before the first optimiser step of the update.
            advantages: Of each token; tokens of a rollout may differ.
            mask: Tokens that count; what a rollout's tokens share is shared over these.
        """

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> dict[str, Bool[Tensor, "rollout token"]]:
        """Tokens to count for the log, by metric name."""
        return {}


@dataclass(frozen=True)
class ClippedSurrogate(Surrogate):
    """PPO's clipped surrogate (1707.06347, eq. 7), with DAPO's separate clips (2503.14476, eq. 10).

    On-policy the loss *value* is about 0 whatever is learnt: the ratio is 1 and advantages sum to
    about nothing. Only its gradient tells.
    """

    clip_low: float = 0.2
    """The ratio stops pulling below 1 minus this."""
    clip_high: float = 0.2
    """The ratio stops pushing above 1 plus this."""

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise ValueError(
                f"ClippedSurrogate has clip_low {self.clip_low} and clip_high {self.clip_high}, "
                "must be 0 < clip_low < 1 and clip_high > 0: 0.2 for both is usual"
            )

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return clipped_surrogate(logprobs, old, advantages, self.clip_low, self.clip_high)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> dict[str, Bool[Tensor, "rollout token"]]:
        ratio = (logprobs - old).exp()
        low = (ratio < 1 - self.clip_low) & (advantages < 0)
        high = (ratio > 1 + self.clip_high) & (advantages > 0)
        return {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
        }


class Reduction(ABC):
    """Sums token losses; the divisor is counted once for the whole optimiser step.

    Loss of a micro-batch: ``sum(weigh(mask) * losses) / sum of count(mask)`` over all
    micro-batches and ranks of the optimiser step, so that the gradient is the same however the
    step is split.
    """

    @abstractmethod
    def weigh(self, mask: TokenMask) -> PerToken:
        """Weight of each token within its micro-batch; `mask` marks the tokens that may learn."""

    @abstractmethod
    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        """What a micro-batch adds to the divisor."""


def _rollouts(mask: TokenMask) -> Float[Tensor, ""]:
    return mask.any(1).sum().float()


@dataclass(frozen=True)
class Dapo(Reduction):
    """Mean over all tokens of the optimiser step. DAPO (2503.14476) eq. 8."""

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask.float()

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return mask.sum().float()


@dataclass(frozen=True)
class Grpo(Reduction):
    """Mean over rollouts of each rollout's mean. DeepSeekMath (2402.03300) eq. 3."""

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return _rollouts(mask)


@dataclass(frozen=True)
class DrGrpo(Reduction):
    """Sum over tokens by a constant, mean over rollouts. Dr. GRPO (2503.20783) section 3.2.

    No rollout's length changes the weight of its tokens. Dr. GRPO also leaves the deviation out:
    set ``advantage: {class_path: GroupRelative, init_args: {scale: none}}``.
    """

    max_tokens: int
    """The constant divisor of every rollout: the token budget of a completion."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(
                f"DrGrpo.max_tokens is {self.max_tokens}, must be at least 1: "
                "use the token budget of a completion"
            )

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / float(self.max_tokens)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return _rollouts(mask)


@dataclass(frozen=True)
class Bnpo(Reduction):
    """Mean over the tokens of each micro-batch, then over micro-batches. As TRL's ``bnpo``.

    By definition local: its gradient depends on the split. The global form is `Dapo`.
    """

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / mask.sum().clamp(min=1)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return torch.ones((), device=mask.device)

"""Losses of single tokens. One abstract class, then its members; more in `sequences`.

On-policy the gradient of every member is that of ``-A logprob``: they differ once the policy has
moved away from `old`, which takes several optimiser steps per update.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ssgrpo_lightning.functional import (
    clipped_surrogate,
    sequence_log_ratio,
    soft_gate,
    truncated_reinforce,
)
from ssgrpo_lightning.functional.shapes import PerToken, TokenMask

# Numbers or truths per token, by metric name.
Watched = dict[str, PerToken | TokenMask]


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

    @property
    def keeps_credit(self) -> bool:
        """Whether a token's gradient follows its own advantage, not the mean of its rollout."""
        return True

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        """What to average over tokens for the log, by metric name."""
        return {}


def clips(log_ratio: PerToken, advantages: PerToken, low: float, high: float) -> Watched:
    """Tokens whose log-ratio is clipped on the side of their advantage, under TRL's names."""
    below, above = (log_ratio < low) & (advantages < 0), (log_ratio > high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": below | above,
    }


def refuse_unless(holds: bool, got: str, rule: str) -> None:
    """Raise a ValueError that says what was got and what it must be, unless the rule holds."""
    if not holds:
        raise ValueError(f"{got}, must be {rule}")


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
        refuse_unless(
            0 < self.clip_low < 1 and self.clip_high > 0,
            f"{type(self).__name__} has clip_low {self.clip_low} and clip_high {self.clip_high}",
            "0 < clip_low < 1 and clip_high > 0: 0.2 for both is usual",
        )

    def log_ratio(self, logprobs: PerToken, old: PerToken, mask: TokenMask) -> PerToken:
        """Log of the ratio that is clipped."""
        return logprobs - old

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        log_ratio = self.log_ratio(logprobs, old, mask)
        return clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        ratio = self.log_ratio(logprobs, old, mask).exp()
        return clips(ratio, advantages, 1 - self.clip_low, 1 + self.clip_high)


@dataclass(frozen=True)
class DualClip(ClippedSurrogate):
    """The clipped surrogate with ``max(…, delta A)`` where A < 0. Dual-clip PPO (1912.09729).

    Bounds what one token that has become far likelier can do; TRL's ``delta`` (INTELLECT-2,
    2505.07291).
    """

    delta: float = 3.0
    """Greatest ratio that multiplies a negative advantage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(
            self.delta > 1 + self.clip_high,
            f"DualClip.delta is {self.delta}",
            f"greater than 1 + clip_high ({1 + self.clip_high}): 3 is usual",
        )

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        log_ratio = self.log_ratio(logprobs, old, mask)
        return clipped_surrogate(log_ratio, advantages, self.clip_low, self.clip_high, self.delta)


@dataclass(frozen=True)
class Cispo(Surrogate):
    """REINFORCE under a truncated importance weight. CISPO (MiniMax-M1, 2506.13585) eq. 4.

    No token loses its gradient. A mean over all tokens: use it with `Dapo`.
    """

    cap: float = 5.0
    """Greatest importance weight."""

    def __post_init__(self) -> None:
        refuse_unless(self.cap >= 1, f"Cispo.cap is {self.cap}", "at least 1: 5 is usual")

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return truncated_reinforce(logprobs, logprobs - old, advantages, self.cap)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        return {"cispo_clip_ratio": ((logprobs - old).exp() > self.cap) & (advantages > 0)}


@dataclass(frozen=True)
class Dppo(Surrogate):
    """`Cispo` without the tokens whose probability has moved too far. DPPO (2602.04879).

    Its form with the total variation of the sampled token. A clip on the ratio stops rare tokens at
    once and likely ones hardly ever; this one looks at the difference ``p - p_old`` itself.
    """

    clip_low: float = 0.2
    """A token of negative advantage stops where its probability has fallen by this."""
    clip_high: float = 0.2
    """A token of positive advantage stops where its probability has grown by this."""
    cap: float = 20.0
    """Greatest importance weight."""

    def __post_init__(self) -> None:
        refuse_unless(
            0 < self.clip_low < 1 and 0 < self.clip_high < 1 and self.cap >= 1,
            f"Dppo has clip_low {self.clip_low}, clip_high {self.clip_high} and cap {self.cap}",
            "0 < clip_low < 1, 0 < clip_high < 1 and cap >= 1: they bound a difference of "
            "probabilities, 0.2 is usual",
        )

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        stopped = self.watch(logprobs, old, advantages, mask)["clip_ratio/region_mean"]
        losses = truncated_reinforce(logprobs, logprobs - old, advantages, self.cap)
        return torch.where(stopped.bool(), 0.0, losses)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        moved = logprobs.detach().exp() - old.exp()
        return clips(moved, advantages, -self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Sapo(Surrogate):
    """A smooth gate on the ratio in place of a clip. SAPO (2511.20347)."""

    tau_positive: float = 1.0
    """How fast the gate closes where the advantage is positive."""
    tau_negative: float = 1.05
    """How fast it closes elsewhere; greater, because what pushes tokens down is less stable."""

    def __post_init__(self) -> None:
        refuse_unless(
            self.tau_positive > 0 and self.tau_negative > 0,
            f"Sapo has tau_positive {self.tau_positive} and tau_negative {self.tau_negative}",
            "both greater than 0: 1 and 1.05 are usual",
        )

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return soft_gate(logprobs - old, advantages, self.tau_positive, self.tau_negative)


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """``-A logprob``, without a ratio: REINFORCE (Williams, 1992).

    With a leave-one-out advantage it is RLOO (2402.14740). Nothing corrects for the policy having
    moved, so it is for one optimiser step per update.
    """

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return -advantages * logprobs


@dataclass(frozen=True)
class OffPolicyMask(Surrogate):
    """Another surrogate without the rollouts that the policy has left behind.

    DeepSeek-V3.2 (2512.02556) eq. 9; TRL's ``off_policy_mask_threshold``. Tokens of negative
    advantage do not count in rollouts whose mean ``old - logprob`` is over the threshold: pushing
    down what the policy would no longer say teaches it little.
    """

    surrogate: Surrogate = ClippedSurrogate()
    """Loss of the tokens that count."""
    threshold: float = 0.5
    """Greatest mean difference of log-probabilities in nats at which such a rollout counts."""

    def __post_init__(self) -> None:
        refuse_unless(
            self.threshold > 0,
            f"OffPolicyMask.threshold is {self.threshold}",
            "greater than 0: 0.5 is usual",
        )

    @property
    def keeps_credit(self) -> bool:
        return self.surrogate.keeps_credit

    def _left(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> TokenMask:
        gap = sequence_log_ratio(old - logprobs.detach(), mask, "geometric")
        return (advantages < 0) & (gap > self.threshold)

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        losses = self.surrogate(logprobs, old, advantages, mask)
        return torch.where(self._left(logprobs, old, advantages, mask), 0.0, losses)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        inner = self.surrogate.watch(logprobs, old, advantages, mask)
        return inner | {"clip_ratio/off_policy_mean": self._left(logprobs, old, advantages, mask)}

"""Surrogates whose ratio is that of a whole rollout."""

from dataclasses import dataclass

import torch

from ssgrpo_lightning.functional import (
    gamma_weight,
    geometric_surrogate,
    sequence_log_ratio,
    with_gradient_of,
)
from ssgrpo_lightning.functional.shapes import PerToken, TokenMask
from ssgrpo_lightning.losses.surrogates import (
    ClippedSurrogate,
    Surrogate,
    Watched,
    clips,
    refuse_unless,
)


@dataclass(frozen=True)
class Gspo(ClippedSurrogate):
    """One clipped ratio for a whole rollout: the geometric mean of its tokens'. GSPO (2507.18071).

    Eq. 5, which is a mean over rollouts: use it with `Grpo`. Its gradient spreads over all tokens
    of a rollout evenly, so that credit of single steps is lost; `GspoToken` keeps it.
    """

    clip_low: float = 3e-4
    """The ratio stops pulling below 1 minus this; far less than a token's ratio would need."""
    clip_high: float = 4e-4
    """The ratio stops pushing above 1 plus this."""

    @property
    def keeps_credit(self) -> bool:
        return False

    def log_ratio(self, logprobs: PerToken, old: PerToken, mask: TokenMask) -> PerToken:
        return sequence_log_ratio(logprobs - old, mask, "geometric")


@dataclass(frozen=True)
class GspoToken(Gspo):
    """`Gspo` for advantages that differ within a rollout. GSPO (2507.18071) eq. 13 and 14.

    The ratio of a token is that of its rollout, with the gradient of the token's own. Where all
    tokens of a rollout share their advantage, value and gradient are those of `Gspo`.
    """

    @property
    def keeps_credit(self) -> bool:
        return True

    def log_ratio(self, logprobs: PerToken, old: PerToken, mask: TokenMask) -> PerToken:
        return with_gradient_of(super().log_ratio(logprobs, old, mask), logprobs)


@dataclass(frozen=True)
class Gmpo(Surrogate):
    """Geometric mean of a rollout's token ratios, each clipped first. GMPO (2507.20673).

    A mean over rollouts: use it with `Grpo`. Every token keeps the gradient of its own advantage.
    """

    clip_low: float = 0.4
    """The log-ratio of a token stops pulling below minus this."""
    clip_high: float = 0.4
    """The log-ratio of a token stops pushing above this."""

    def __post_init__(self) -> None:
        refuse_unless(
            self.clip_low > 0 and self.clip_high > 0,
            f"Gmpo has clip_low {self.clip_low} and clip_high {self.clip_high}",
            "both greater than 0: 0.4 is usual",
        )

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return geometric_surrogate(logprobs - old, advantages, mask, self.clip_low, self.clip_high)

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        return clips(logprobs - old, advantages, -self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Vespo(Surrogate):
    """REINFORCE under a gamma-shaped weight of the rollout's whole ratio. VESPO (2602.10693).

    ``-sg(w^k e^(lambda (1 - w))) A logprob``, with w the product of the rollout's token ratios.
    """

    power_positive: float = 2.0
    """k where the advantage is not negative: how fast weights fall below a ratio of 1."""
    decay_positive: float = 3.0
    """lambda there: how fast they fall above it."""
    power_negative: float = 3.0
    """k where the advantage is negative."""
    decay_negative: float = 2.0
    """lambda there."""

    def __post_init__(self) -> None:
        refuse_unless(
            min(vars(self).values()) > 0,
            "Vespo has " + ", ".join(f"{k} {v}" for k, v in vars(self).items()),
            "all greater than 0: 2, 3, 3 and 2 are usual",
        )

    def weights(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        """Weight of each token."""
        log_ratio = sequence_log_ratio((logprobs - old).detach(), mask, "sum")
        power = torch.where(advantages >= 0, self.power_positive, self.power_negative)
        decay = torch.where(advantages >= 0, self.decay_positive, self.decay_negative)
        return gamma_weight(log_ratio, power, decay)

    def __call__(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> PerToken:
        return -self.weights(logprobs, old, advantages, mask) * advantages * logprobs

    def watch(
        self, logprobs: PerToken, old: PerToken, advantages: PerToken, mask: TokenMask
    ) -> Watched:
        return {"vespo/phi_seq_mean": self.weights(logprobs, old, advantages, mask)}

"""How much a token counts that another program sampled. One abstract class, then its members.

A rollout engine and the trainer never compute quite the same log-probabilities. The weight of a
token is what the trainer's policy, before the update, makes of the engine's:
``r = exp(old - sampled)``, of the token itself or of its whole rollout, bounded in one of two ways.
It multiplies the policy term only, never KL or entropy. "Your efficient RL framework secretly
brings you off-policy training" (Yao et al., 2025); in TRL `vllm_importance_sampling_mode`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from ssgrpo_lightning.functional import sequence_log_ratio
from ssgrpo_lightning.functional.shapes import PerToken, TokenMask


class Correction(ABC):
    """Weight of each token in the policy term, from the gap between trainer and engine."""

    def ratio(self, log_ratio: PerToken, mask: TokenMask) -> PerToken:
        """Ratio of each token as it is logged, before any bound.

        Args:
            log_ratio: The trainer's log-probability before the update less the engine's.
            mask: Tokens that count; the ratio of a rollout is taken over these.
        """
        return log_ratio.exp()

    @abstractmethod
    def weigh(self, ratio: PerToken) -> PerToken:
        """Weight of each token, given its ratio."""


@dataclass(frozen=True)
class NoCorrection(Correction):
    """Every token counts as it is; the ratios are logged all the same. PPO (1707.06347)."""

    def weigh(self, ratio: PerToken) -> PerToken:
        return torch.ones_like(ratio)


@dataclass(frozen=True)
class _Bounded(Correction):
    floor: float = 0.0
    """Least ratio of full effect."""
    cap: float = 3.0
    """Greatest ratio of full effect."""

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1 < self.cap:
            raise ValueError(
                f"{type(self).__name__} has floor {self.floor} and cap {self.cap}, must be "
                "0 <= floor < 1 < cap: 0 and 3 are usual"
            )


@dataclass(frozen=True)
class TokenTruncated(_Bounded):
    """Ratios of tokens, held between the bounds: truncated importance sampling (Yao, 2025)."""

    def weigh(self, ratio: PerToken) -> PerToken:
        return ratio.clamp(self.floor, self.cap)


@dataclass(frozen=True)
class TokenMasked(_Bounded):
    """Ratios of tokens; one outside the bounds does not count: IcePop (Ling team, 2510.18855)."""

    def weigh(self, ratio: PerToken) -> PerToken:
        within = (ratio >= self.floor) & (ratio <= self.cap)
        return torch.where(within, ratio, 0.0)


@dataclass(frozen=True)
class SequenceTruncated(TokenTruncated):
    """The ratio of the whole rollout at each of its tokens, held between the bounds."""

    mean: Literal["sum", "geometric"] = "sum"
    """Over tokens: the sum of their log-ratios is exact and grows with length (Liu et al., 2025);
    their mean, the geometric mean of the ratios, does not (GSPO, 2507.18071)."""

    def ratio(self, log_ratio: PerToken, mask: TokenMask) -> PerToken:
        return sequence_log_ratio(log_ratio, mask, self.mean).exp()


@dataclass(frozen=True)
class SequenceMasked(TokenMasked):
    """The ratio of the whole rollout; a rollout outside the bounds does not count.

    TRL's default, "When speed kills stability" (Liu et al., 2025).
    """

    mean: Literal["sum", "geometric"] = "sum"
    """Over tokens: as in `SequenceTruncated`."""

    def ratio(self, log_ratio: PerToken, mask: TokenMask) -> PerToken:
        return sequence_log_ratio(log_ratio, mask, self.mean).exp()

"""What holds the policy to its reference: estimators of the KL, where it acts, how strongly.

Three abstract classes, each with its members. Weights of steps never multiply the KL.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ssgrpo_lightning.functional import adapted_beta, kl_k1, kl_k2, kl_k3, with_gradient_of
from ssgrpo_lightning.functional.shapes import PerRollout, PerToken, TokenMask


class KlEstimator(ABC):
    """Estimate of KL(policy || reference) from one sampled token, in nats."""

    unbiased_gradient: ClassVar[bool] = True
    """Whether its gradient is that of the divergence, on average over tokens of the policy."""

    @abstractmethod
    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        """Estimate at each token.

        Args:
            logprobs: Log-probabilities as they are now; the only argument with a gradient.
            old: Those before the first optimiser step of the update.
            reference: Those of the reference.
        """


@dataclass(frozen=True)
class K1(KlEstimator):
    """``logprob - ref`` (Schulman, 2020): right on average, but its gradient is 0 on average.

    For the reward. In the loss it would hold the policy to nothing.
    """

    unbiased_gradient: ClassVar[bool] = False

    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        return kl_k1(logprobs, reference)


@dataclass(frozen=True)
class K2(KlEstimator):
    """``(logprob - ref)^2 / 2`` (Schulman, 2020): its gradient is right on average, on-policy."""

    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        return kl_k2(logprobs, reference)


@dataclass(frozen=True)
class K3(KlEstimator):
    """``e^d - d - 1``, ``d = ref - logprob``: GRPO's (DeepSeekMath, 2402.03300, eq. 4).

    Right on average and never negative. Its gradient on average is that of the forward divergence,
    KL(reference || policy).
    """

    unbiased_gradient: ClassVar[bool] = False

    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        return kl_k3(logprobs, reference)


@dataclass(frozen=True)
class StraightThroughK3(KlEstimator):
    """The value of `K3` with the gradient of `K2`, which is right on average (Schulman, 2020)."""

    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        return with_gradient_of(kl_k3(logprobs, reference), kl_k2(logprobs, reference))


@dataclass(frozen=True)
class RatioCorrected(KlEstimator):
    """Another estimate times the ratio of the token to `old`. DeepSeek-V3.2 (2512.02556).

    Value and gradient are right on average over tokens that `old` sampled, also after several
    optimiser steps. TRL's ``use_bias_correction_kl``.
    """

    estimator: KlEstimator = K3()
    """What is multiplied; `K1` or `K3`, whose values are right on average."""

    def __call__(self, logprobs: PerToken, old: PerToken, reference: PerToken) -> PerToken:
        return (logprobs - old).exp() * self.estimator(logprobs, old, reference)


class KlTerm(ABC):
    """Where the KL acts."""

    estimator: KlEstimator
    holds_dead: bool = False

    def in_reward(self, kl: PerToken, mask: TokenMask) -> PerRollout:
        """What is taken off the reward of each rollout, before beta."""
        return kl.new_zeros(len(kl))

    def in_loss(self, kl: PerToken, advantages: PerToken) -> PerToken:
        """What is added to the loss of each token, before beta."""
        return torch.zeros_like(kl)


@dataclass(frozen=True)
class KlInLoss(KlTerm):
    """Beta times the KL of a token is added to its loss. DeepSeekMath (2402.03300) eq. 3."""

    estimator: KlEstimator = K3()
    """How it is estimated."""
    holds_dead: bool = True
    """Whether it also acts on rollouts without an advantage, those of dead groups first of all.
    They are then trained on like the others; the divisor counts them in any case."""

    def __post_init__(self) -> None:
        if isinstance(self.estimator, K1):
            warnings.warn(
                "KlInLoss.estimator is K1, whose gradient is 0 on average, so that it holds the "
                "policy to nothing: use K3, K2, RatioCorrected, or K1 in KlInReward",
                stacklevel=2,
            )

    def in_loss(self, kl: PerToken, advantages: PerToken) -> PerToken:
        acts = (advantages != 0).any(1, keepdim=True) | self.holds_dead
        return torch.where(acts, kl, 0.0)


@dataclass(frozen=True)
class KlInReward(KlTerm):
    """Beta times the KL of a rollout is taken off its reward. Ziegler et al. (1909.08593) eq. 2.

    Before advantages are made, so it is relative to the group like the reward. Estimators of step
    values still learn from the bare outcome.
    """

    estimator: KlEstimator = K1()
    """How the KL of a token is estimated; that of a rollout is the sum over its tokens."""

    def in_reward(self, kl: PerToken, mask: TokenMask) -> PerRollout:
        return torch.where(mask, kl, 0.0).sum(1)


class BetaControl(ABC):
    """How the weight of the KL moves from update to update."""

    adapts: ClassVar[bool] = True
    """Whether it moves at all, so that it is saved and resumed."""

    @abstractmethod
    def follow(self, beta: float, kl: float) -> float:
        """Weight for the next update, given that of this one and its mean KL per token in nats."""


@dataclass(frozen=True)
class FixedBeta(BetaControl):
    """It stays ``policy.beta``."""

    adapts: ClassVar[bool] = False

    def follow(self, beta: float, kl: float) -> float:
        return beta


@dataclass(frozen=True)
class AdaptiveBeta(BetaControl):
    """It grows where the KL is over a target and shrinks where it is under.

    Ziegler et al. (1909.08593) section 2.2. It starts at ``policy.beta``.
    """

    target: float
    """Mean KL per token that is wanted, in nats."""
    horizon: float = 10.0
    """Over so many updates it moves by about a fifth at most, up or down; the paper's is 10."""

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon >= 1):
            raise ValueError(
                f"AdaptiveBeta has target {self.target} and horizon {self.horizon}, must be "
                "target > 0 and horizon >= 1: 0.01 nats and 10 updates are a start"
            )

    def follow(self, beta: float, kl: float) -> float:
        return adapted_beta(beta, kl, self.target, self.horizon)

"""Objectives: what the estimator's logits mean, and what they are trained toward.

One abstract class, then its members. All targets are the verifier's outcome in [0, 1]; groups of
equal outcomes teach nothing and are skipped (the published target would train every step of an
all-correct group toward 0).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional import (
    mean_steps,
    mixed_groups,
    noisy_and_logprob,
    outcome_loss,
    pairwise_loss,
    prefix_loss,
    relative_rewards,
)
from ssgrpo_lightning.records import StepScores

Logits = Float[Tensor, "rollout step"]


class Objective(ABC):
    """Gives the estimator's logits a meaning and a loss."""

    def scores(self, logits: Logits) -> Float[Tensor, "rollout step"]:
        """Soundness of each step in [0, 1]."""
        return logits.sigmoid()

    @abstractmethod
    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        """Value of the prefix that ends with each step: expected reward from there.

        Args:
            logits: Of the estimator; a step may only look at itself and those before it.
            baseline: Value before the first step.
        """

    @abstractmethod
    def loss(self, logits: Logits, outcomes: StepScores) -> Float[Tensor, " rollout"]:
        """Loss of each rollout; 0 outside mixed groups."""


def _learnt(loss: Float[Tensor, " rollout"], outcomes: StepScores) -> Float[Tensor, " rollout"]:
    """Loss of rollouts in mixed groups, 0 elsewhere.

    Rewards are made finite before: a NaN in the branch not taken would still spoil the gradient.
    """
    return torch.where(mixed_groups(outcomes.rewards, outcomes.group), loss, 0.0)


@dataclass(frozen=True)
class PublishedMSE(Objective):
    """The published form: squared error of the score to the group's min-max normalised reward.

    The value of a prefix is the score of its last step.
    """

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return logits.sigmoid()

    def loss(self, logits: Logits, outcomes: StepScores) -> Float[Tensor, " rollout"]:
        target = relative_rewards(outcomes.rewards, outcomes.group).nan_to_num()[:, None]
        return _learnt(mean_steps((logits.sigmoid() - target).square(), outcomes.mask), outcomes)


@dataclass(frozen=True)
class NoisyAnd(Objective):
    """A rollout succeeds only if every step is sound: ``log P = sum_t log sigmoid(z_t)``.

    The value of a prefix is the baseline times the soundness of its steps: it falls at an unsound
    step and stays down.
    """

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return baseline[:, None] * logits.sigmoid().cumprod(1)

    def loss(self, logits: Logits, outcomes: StepScores) -> Float[Tensor, " rollout"]:
        logprob = noisy_and_logprob(logits, outcomes.mask)
        return _learnt(outcome_loss(logprob, outcomes.rewards.nan_to_num()), outcomes)


@dataclass(frozen=True)
class Pairwise(NoisyAnd):
    """Successes above failures of the same group: ``softplus(margin - (log P_+ - log P_-))``.

    ``log P`` is that of `NoisyAnd`. The published text asks for this contrast; the margin is the
    one that the entropy watch raises.
    """

    margin: float = 0.1
    """Nats by which a success must lie above a failure before the loss lets go."""

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise ValueError(f"Pairwise.margin is {self.margin}, must be at least 0: raise it")

    def loss(self, logits: Logits, outcomes: StepScores) -> Float[Tensor, " rollout"]:
        logprob = noisy_and_logprob(logits, outcomes.mask)
        loss = pairwise_loss(logprob, outcomes.rewards, outcomes.group, self.margin)
        return _learnt(loss, outcomes)


@dataclass(frozen=True)
class PrefixBCE(Objective):
    """Cross-entropy of every prefix value to the outcome, ``V_t = sigmoid(logit(m) + z_t)``.

    The offset by the group's mean leaves only differences within a group to be learnt.
    """

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return (torch.logit(baseline)[:, None] + logits).sigmoid()

    def loss(self, logits: Logits, outcomes: StepScores) -> Float[Tensor, " rollout"]:
        loss = prefix_loss(logits, outcomes.mask, outcomes.rewards.nan_to_num(), outcomes.baseline)
        return _learnt(loss, outcomes)

"""Objectives: what the estimator's logits mean, and what they are trained toward.

One abstract class, then its members. All targets are the verifier's outcome in [0, 1]. What is
learnt within groups skips those of equal outcomes, which teach nothing (the published target would
train every step of an all-correct group toward 0).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.functional import (
    lambda_returns,
    mean_steps,
    mixed_groups,
    noisy_and_logprob,
    others_mean,
    outcome_loss,
    pairwise_loss,
    prefix_loss,
    relative_rewards,
    value_loss,
)
from ssgrpo_lightning.records import Rollouts, StepScores

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
    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        """Loss of each rollout; 0 where it is not `learnable`.

        Args:
            logits: Of the estimator as it is now.
            scores: The outcomes, and what the estimator thought when the rollouts came in.
        """

    def learnable(
        self, rewards: Float[Tensor, " rollout"], group: Int[Tensor, " rollout"]
    ) -> Bool[Tensor, " rollout"]:
        """Rollouts that teach something: by default those of mixed groups."""
        return mixed_groups(rewards, group)

    def view(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts as the estimator reads them, one logit per step: by default as they are."""
        return rollouts

    def read(self, logits: Logits, outcomes: StepScores) -> StepScores:
        """The outcomes with the logits of the `view` read as scores and values."""
        values = self.values(logits, outcomes.baseline)
        return replace(outcomes, scores=self.scores(logits), values=values)

    def _learnt(
        self, loss: Float[Tensor, " rollout"], scores: StepScores
    ) -> Float[Tensor, " rollout"]:
        """Loss of rollouts that are learnable, 0 elsewhere.

        Rewards are made finite before: a NaN in the branch not taken would spoil the gradient.
        """
        return torch.where(self.learnable(scores.rewards, scores.group), loss, 0.0)


@dataclass(frozen=True)
class PublishedMSE(Objective):
    """The published form: squared error of the score to the group's min-max normalised reward.

    The value of a prefix is the score of its last step.
    """

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return logits.sigmoid()

    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        target = relative_rewards(scores.rewards, scores.group).nan_to_num()[:, None]
        return self._learnt(mean_steps((logits.sigmoid() - target).square(), scores.mask), scores)


@dataclass(frozen=True)
class LeaveOneOut(PublishedMSE):
    """For values that the *other* rollouts of the group give: V_0 is their mean reward, too.

    A rollout's own reward is then in none of its values, and is what they are trained toward.
    """

    def read(self, logits: Logits, outcomes: StepScores) -> StepScores:
        others = others_mean(outcomes.rewards, outcomes.group)
        return replace(super().read(logits, outcomes), baseline=others)


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

    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        logprob = noisy_and_logprob(logits, scores.mask)
        return self._learnt(outcome_loss(logprob, scores.rewards.nan_to_num()), scores)


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

    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        logprob = noisy_and_logprob(logits, scores.mask)
        loss = pairwise_loss(logprob, scores.rewards, scores.group, self.margin)
        return self._learnt(loss, scores)


@dataclass(frozen=True)
class PrefixBCE(Objective):
    """Cross-entropy of every prefix value to the outcome, ``V_t = sigmoid(logit(m) + z_t)``.

    The offset by the group's mean leaves only differences within a group to be learnt.
    """

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return (torch.logit(baseline)[:, None] + logits).sigmoid()

    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        loss = prefix_loss(logits, scores.mask, scores.rewards.nan_to_num(), scores.baseline)
        return self._learnt(loss, scores)


@dataclass(frozen=True)
class ValueRegression(Objective):
    """A critic: squared error of every value to the lambda-return, ``V_t = sigmoid(z_t)``.

    Knows no group: the prompt counts as a step and its value is V_0, so that the first step, too,
    is measured against the critic and not against the group's mean. Every rollout with a verdict
    teaches it, also in groups of equal outcomes. Source: PPO (1707.06347).
    """

    lam: float = 1.0
    """Lambda of the return to learn; 1 is the outcome. VAPO (2504.05118) keeps it 1."""
    gamma: float = 1.0
    """Discount per step; that of the credit rule."""
    clip: float | None = None
    """How far from its old value a value is trained before it waits for new rollouts; null: any."""

    def __post_init__(self) -> None:
        if not (0 <= self.lam <= 1 and 0 < self.gamma <= 1):
            raise ValueError(
                f"ValueRegression has lam {self.lam} and gamma {self.gamma}, must be 0 <= lam <= 1 "
                "and 0 < gamma <= 1: 1 for both learns the outcome"
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(
                f"ValueRegression.clip is {self.clip}, must be greater than 0, or null for none"
            )

    def learnable(
        self, rewards: Float[Tensor, " rollout"], group: Int[Tensor, " rollout"]
    ) -> Bool[Tensor, " rollout"]:
        return ~rewards.isnan()

    def view(self, rollouts: Rollouts) -> Rollouts:
        return rollouts.with_prompt_step()

    def values(
        self, logits: Logits, baseline: Float[Tensor, " rollout"]
    ) -> Float[Tensor, "rollout step"]:
        return logits.sigmoid()

    def read(self, logits: Logits, outcomes: StepScores) -> StepScores:
        start, logits = logits[:, 0].sigmoid(), logits[:, 1:]
        return replace(super().read(logits, outcomes), baseline=start)

    def loss(self, logits: Logits, scores: StepScores) -> Float[Tensor, " rollout"]:
        known = scores.rewards.nan_to_num()
        old = torch.cat([scores.baseline[:, None], scores.values], 1)
        targets = lambda_returns(
            scores.values, scores.baseline, known, scores.mask, self.lam, self.gamma
        )
        losses = value_loss(logits.sigmoid(), targets, old, self.clip)
        return self._learnt(mean_steps(losses, pad(scores.mask, (1, 0), value=True)), scores)

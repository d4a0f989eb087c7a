"""Credit rules: step values to per-step advantages. One abstract class, then its members.

Every rule returns advantages per step, which are spread over the step's tokens. A weighting is a
rule that multiplies the group advantage. An unsound step of a failure should be blamed most, a
sound step of a success praised most.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.advantages import GroupRelative, outcomes_of
from ssgrpo_lightning.functional import (
    clipped_baseline,
    fall_shares,
    gae,
    gain_weights,
    gated,
    group_deviation,
    group_mean,
    mean_one,
    mixed_groups,
    process_advantages,
    sign_aware,
    step_advantages,
    step_lengths,
    survival_gains,
    value_gains,
    whiten,
    whiten_by_place,
    window_mean,
)
from ssgrpo_lightning.records import Rollouts, StepScores

PerStep = Float[Tensor, "rollout step"]


def outcome_scores(
    rollouts: Rollouts, advantages: Float[Tensor, " rollout"] | None = None
) -> StepScores:
    """What the outcomes alone say: group advantages, and the same value for every prefix.

    Args:
        rollouts: The rollouts.
        advantages: Advantage of each rollout; None: that of `GroupRelative`.
    """
    if advantages is None:
        advantages = GroupRelative()(outcomes_of(rollouts))
    lengths = step_lengths(rollouts.step, rollouts.steps)
    baseline = clipped_baseline(rollouts.rewards, rollouts.group)
    even = baseline[:, None].expand(lengths.shape)
    return StepScores(
        scores=even,
        values=even,
        mask=lengths > 0,
        lengths=lengths,
        rewards=rollouts.rewards,
        baseline=baseline,
        advantages=advantages,
        group=rollouts.group,
        policy_step=rollouts.policy_step,
    )


class CreditRule(ABC):
    """Turns the values of steps into their advantages."""

    needs_values: ClassVar[bool] = True
    """Whether the rule looks at the estimator; if not, the estimator neither runs nor costs."""
    gate: ClassVar[float] = 0.0
    """Share of the rule's weighting that acts; 0 for rules that do not weight."""
    keeps_sign: ClassVar[bool] = True
    """Whether no step of a success is blamed and no step of a failure praised."""
    deterministic: ClassVar[bool] = True
    """Whether credit follows from the rollouts alone, in any order; False for rules that draw."""

    @abstractmethod
    def __call__(self, scores: StepScores) -> PerStep:
        """Advantage of each step."""

    def weights(self, scores: StepScores) -> PerStep:
        """Weight of each step before the gate, for monitors; 1 where a rule does not weight."""
        return torch.ones_like(scores.values)


@dataclass(frozen=True)
class Broadcast(CreditRule):
    """Plain GRPO: every step gets the group advantage of its rollout."""

    needs_values: ClassVar[bool] = False

    def __call__(self, scores: StepScores) -> PerStep:
        return scores.advantages[:, None].expand(scores.values.shape)


@dataclass(frozen=True)
class StepAdvantage(CreditRule):
    """The advantage of every step itself, ``V_t - V_{t-1}``, with the outcome for the last value.

    VinePPO's credit (2410.01679) with the group mean for V_0, so that a rollout's steps sum to its
    group advantage. The exact rule, if the values are right: use it with `MonteCarlo`. Values that
    know nothing put all credit on the last step, so a weighting is safer with learnt ones.
    """

    keeps_sign: ClassVar[bool] = False

    scale: bool = True
    """Divide by the deviation of the group's rewards, as GRPO does; its dead groups then get 0."""

    def __call__(self, scores: StepScores) -> PerStep:
        rewards, group = scores.rewards, scores.group
        mean, learns = group_mean(rewards, group), ~rewards.isnan()
        advantages = step_advantages(scores.values, rewards, mean, scores.mask)
        if self.scale:
            learns = mixed_groups(rewards, group)
            advantages = advantages / group_deviation(rewards, group)[:, None]
        return torch.where(learns[:, None], advantages, 0.0)


@dataclass(frozen=True)
class ProcessAdvantage(CreditRule):
    """Process supervision: the score of a step is its reward, normalised over the group's steps.

    A step's advantage is the sum of the normalised rewards of its own and all later steps; the
    outcome does not enter, except that rollouts without a verdict get 0 and leave the statistics.
    DeepSeekMath (2402.03300) section 4.1.3.

    The normalised rewards of a group sum to 0, so steps as such earn nothing. Yet the rule is not
    blind to how a text is cut: a rollout whose steps are better than the group's mean gains by
    cutting itself into more of them, and one whose steps are worse loses.
    """

    keeps_sign: ClassVar[bool] = False

    outcome: float = 0.0
    """Weight of the outcome advantage that is added to every step; 0 is the paper's rule."""

    def __post_init__(self) -> None:
        if self.outcome < 0:
            raise ValueError(
                f"ProcessAdvantage.outcome is {self.outcome}, must be at least 0: 0 leaves the "
                "outcome out, 1 adds the advantage of plain GRPO"
            )

    def __call__(self, scores: StepScores) -> PerStep:
        counted = scores.mask & ~scores.rewards.isnan()[:, None]
        process = process_advantages(scores.scores, counted, scores.group)
        return process + self.outcome * scores.advantages[:, None]


@dataclass(frozen=True)
class Weighting(CreditRule):
    """A rule that multiplies the group advantage: ``A_i (1 + g (w - 1))``."""

    gate: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Share g of the weighting that acts, in [0, 1]; 0 is plain GRPO, bit for bit."""
    window: int = 512
    """Tokens of the windows in which very long rollouts average their weights."""
    window_over: int = 5000
    """Completion tokens over which a rollout counts as very long."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.gate <= 1:
            raise ValueError(
                f"{name}.gate is {self.gate}, must be in [0, 1]: 0 is plain GRPO, 1 full weights"
            )
        if self.window < 1 or self.window_over < self.window:
            raise ValueError(
                f"{name}.window is {self.window} and window_over is {self.window_over}, must be "
                "1 <= window <= window_over: raise window_over to switch windows off"
            )

    @abstractmethod
    def raw_weights(self, scores: StepScores) -> PerStep:
        """Weights as the formula gives them."""

    def weights(self, scores: StepScores) -> PerStep:
        return window_mean(self.raw_weights(scores), scores.lengths, self.window, self.window_over)

    def __call__(self, scores: StepScores) -> PerStep:
        return scores.advantages[:, None] * gated(self.weights(scores), self.gate)


@dataclass(frozen=True)
class PublishedProduct(Weighting):
    """The published form, ``A_i w(s)`` with w the score; never normalised.

    In failures it blames the *sound* steps most: kept as a baseline.
    """

    def raw_weights(self, scores: StepScores) -> PerStep:
        return scores.scores


@dataclass(frozen=True)
class SignAware(Weighting):
    """Score where A > 0, 1 - score where A < 0; floored, mean 1. OREAL (2502.06781) eq. 10."""

    floor: float = 0.1
    """Least weight before the mean-1 step, so that no step stops learning."""

    def raw_weights(self, scores: StepScores) -> PerStep:
        weights = sign_aware(scores.scores, scores.advantages).clamp(min=self.floor)
        return mean_one(weights, scores.lengths)


@dataclass(frozen=True)
class ValueGain(Weighting):
    """``w_t = clip(1 + k sign(A_i) D_t, floor, w_max)`` with mean 1, D_t what the step gained.

    A failure blames the step at which the value fell, a success praises the one at which it rose.
    k = 0 is plain GRPO.
    """

    k: float = 4.0
    """How strongly a gain bends the weight."""
    floor: float = 0.1
    """Least weight before the mean-1 step, so that no step stops learning."""
    w_max: float = 4.0
    """Greatest weight before the mean-1 step, so that no step carries the update alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1 <= self.w_max or self.k < 0:
            raise ValueError(
                f"ValueGain has k {self.k}, floor {self.floor}, w_max {self.w_max}, must be "
                "k >= 0 and 0 <= floor <= 1 <= w_max: a step without gain has weight 1"
            )

    def raw_weights(self, scores: StepScores) -> PerStep:
        gains = value_gains(scores.values, scores.baseline, scores.mask)
        weights = gain_weights(gains, scores.advantages, self.k, self.floor, self.w_max)
        return mean_one(weights, scores.lengths)


@dataclass(frozen=True)
class Hindsight(Weighting):
    """Blames a failure's steps by their share in the fall of its value; praises successes evenly.

    Under `NoisyAnd` that share is the probability that the step was the first unsound one, given
    that the rollout failed. In a success no step is known to have mattered more than another, and
    praising the certain ones most would only sharpen the policy.
    """

    floor: float = 0.1
    """Share of the blame that stays spread over all tokens, so that no step stops learning."""
    w_max: float = 4.0
    """Greatest weight: what would exceed it is forgiven, so that blame stays bounded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1 <= self.w_max:
            raise ValueError(
                f"Hindsight has floor {self.floor} and w_max {self.w_max}, must be "
                "0 <= floor <= 1 <= w_max: floor 1 is plain GRPO"
            )

    def raw_weights(self, scores: StepScores) -> PerStep:
        gains = value_gains(scores.values, scores.baseline, scores.mask)
        shares = mean_one(fall_shares(gains), scores.lengths)
        blame = (self.floor + (1 - self.floor) * shares).clamp(max=self.w_max)
        return torch.where(scores.advantages[:, None] < 0, blame, 1.0)


@dataclass(frozen=True)
class Survival(CreditRule):
    """What each step did to the chance that every step is sound, whiten_by_place over the batch.

    The outcome enters only through the estimator, so a group without a success teaches too. Exact
    soundness makes of this the least noisy credit that we know; soundness read from the policy's
    own confidence makes of it a drive to be more confident.
    """

    keeps_sign: ClassVar[bool] = False

    def __call__(self, scores: StepScores) -> PerStep:
        gains = survival_gains(scores.scores, scores.mask)
        judged = ~scores.rewards.isnan()[:, None] * scores.lengths
        return torch.where(judged > 0, whiten_by_place(gains, judged), 0.0)


@dataclass(frozen=True)
class GAE(CreditRule):
    """Generalised advantage estimation over steps, as PPO with a critic (1506.02438 eq. 16).

    Looks at no group: the advantage of a step is what came out less what a value model expected
    before it, so that groups of equal outcomes train the policy, too. With steps of one token
    (segmenter `ByTokens`) it is PPO's own. V_0 is the critic's value of the prompt under the
    objective `ValueRegression`, and the group's mean under the others.
    """

    keeps_sign: ClassVar[bool] = False
    lam: float = 0.95
    """Trust in the outcome over later values: 1 gives R - V_{t-1}, 0 gives V_t - V_{t-1}."""
    gamma: float = 1.0
    """Discount per step."""
    whiten: bool = True
    """Bring the advantages of the rank's tokens to mean 0 and deviation 1 in every update."""

    def __post_init__(self) -> None:
        if not (0 <= self.lam <= 1 and 0 < self.gamma <= 1):
            raise ValueError(
                f"GAE has lam {self.lam} and gamma {self.gamma}, must be 0 <= lam <= 1 and "
                "0 < gamma <= 1: 0.95 and 1 are usual"
            )

    def __call__(self, scores: StepScores) -> PerStep:
        advantages = gae(
            scores.values, scores.baseline, scores.rewards, scores.mask, self.lam, self.gamma
        )
        known = ~scores.rewards.isnan()[:, None]
        return whiten(advantages, (scores.lengths * known).float()) if self.whiten else advantages

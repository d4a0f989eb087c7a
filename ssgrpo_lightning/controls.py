"""Control arms: the weights of a credit rule where they do not belong.

A rule that does no better than these owes nothing to *which* step it points at.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ssgrpo_lightning.credit import PerStep, ValueGain, Weighting
from ssgrpo_lightning.functional import (
    counted_generator,
    mean_one,
    shuffled_across,
    shuffled_within,
)
from ssgrpo_lightning.records import StepScores

STREAM = 1 << 31  # apart from the generators of a run, which count from 0


@dataclass(frozen=True)
class Placebo(Weighting):
    """A weighting that moves the weights of another to other steps; the mean is 1 again after it.

    What moves where follows from `seed`, the update and the place of a rollout in the batch, so
    that a run can be repeated. Ranks draw the same moves for rollouts of their own.
    """

    deterministic: ClassVar[bool] = False

    rule: Weighting = ValueGain()
    """The weighting under test; its windows act, its gate does not: `gate` is that of this rule."""
    seed: int = 0
    """Seed of the moves."""

    @abstractmethod
    def moved(self, weights: PerStep, scores: StepScores, generator: torch.Generator) -> PerStep:
        """The weights at other steps."""

    def raw_weights(self, scores: StepScores) -> PerStep:
        generator = counted_generator(self.seed, scores.policy_step, STREAM)
        moved = self.moved(self.rule.weights(scores), scores, generator)
        return mean_one(moved, scores.lengths)

    def weights(self, scores: StepScores) -> PerStep:
        # Averaged in windows once more, the weights of very long rollouts would be too even.
        return self.raw_weights(scores)


@dataclass(frozen=True)
class RandomWeights(Placebo):
    """Random weights of the same entropy: each rollout's own, in a random order of its steps."""

    def moved(self, weights: PerStep, scores: StepScores, generator: torch.Generator) -> PerStep:
        return shuffled_within(weights, scores.mask, generator)


@dataclass(frozen=True)
class ShuffledWeights(Placebo):
    """The rule's weights, shuffled among the steps of other rollouts with the same outcome.

    The same means above, equal to or below the mean of their group: weights of successes and of
    failures have different distributions, and only the place of a weight shall change, not what
    weights the failures get.
    """

    def moved(self, weights: PerStep, scores: StepScores, generator: torch.Generator) -> PerStep:
        sign = scores.advantages.sign().long() + 1
        return shuffled_across(weights, scores.mask, sign, generator)

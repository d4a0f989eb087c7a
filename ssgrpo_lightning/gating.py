"""Gates: how much of a credit rule's weighting acts, from what has been measured.

One abstract class, then its members, which hold hyperparameters only: what they remember is a
`Watch`, which `SSGRPO` holds and saves.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ssgrpo_lightning.credit import CreditRule, Weighting

START_UPDATES = 10
REWARD_MEMORY = 0.9


@dataclass(frozen=True)
class Watch:
    """What a gate remembers of the updates so far; plain numbers, saved in checkpoints."""

    updates: int = 0
    """Updates seen."""
    entropy_start: float = 0.0
    """Mean policy entropy of the first updates, in nats."""
    reward: float = 0.0
    """Exponential running mean of the reward."""
    best_reward: float = 0.0
    """Greatest value of that mean so far."""
    harm: str = ""
    """The harm that keeps the gate closed, for people; empty if there is none."""


class Gate(ABC):
    """Says what share of a rule's own gate acts."""

    needs_skill: ClassVar[bool] = False
    """Whether the gate reads the step skill, so that there has to be a probe."""

    @abstractmethod
    def opening(self, skill: float, watch: Watch) -> float:
        """Share in [0, 1] of the rule's own gate that acts.

        Args:
            skill: Running mean of the estimator's step skill; 0 until it is measured.
            watch: What the gate remembers.
        """

    def follow(self, watch: Watch, metrics: Mapping[str, float]) -> Watch:
        """What the gate remembers after an update that measured `metrics`."""
        return watch

    def line(self, skill: float, watch: Watch) -> str:
        """One line for people on why the gate is where it is; empty: nothing to say."""
        return ""

    def acting(self, rule: CreditRule, skill: float, watch: Watch) -> CreditRule:
        """The rule with the gate that acts; rules that do not weight stay as they are."""
        if not isinstance(rule, Weighting):
            return rule
        return replace(rule, gate=rule.gate * self.opening(skill, watch))


@dataclass(frozen=True)
class FixedGate(Gate):
    """The rule's own gate acts, whatever is measured."""

    def opening(self, skill: float, watch: Watch) -> float:
        return 1.0


@dataclass(frozen=True)
class SkillGate(Gate):
    """Opens with the step skill of the estimator, and closes on harm to the policy.

    Skill is no protection from harm: an estimator that finds every fault may still sharpen the
    policy until it collapses. So three bounds close the gate, whatever the skill. It opens again
    once all of them are kept with room to spare. Closed, the update is plain GRPO, bit for bit, and
    the estimator goes on learning.
    """

    needs_skill: ClassVar[bool] = True

    open_at: float = 0.1
    """Step skill up to which the gate is closed."""
    full_at: float = 0.5
    """Step skill from which the rule's whole gate acts; between the two it grows evenly."""
    entropy_floor: float | None = 0.2
    """Policy entropy below this share of its mean in the first 10 updates is harm; null: never."""
    kl_ceiling: float | None = 0.1
    """Mean difference in nats between the sampler's and the trainer's log-probabilities above
    which there is harm; null: never. About 0 where an update is one optimiser step."""
    reward_drop: float | None = 0.1
    """Fall of the running mean reward under its best that is harm; null: never."""
    hysteresis: float = 0.25
    """Share of a bound by which it must be kept again before the gate opens again."""

    def __post_init__(self) -> None:
        if not 0 <= self.open_at < self.full_at <= 1:
            raise ValueError(
                f"SkillGate has open_at {self.open_at} and full_at {self.full_at}, must be "
                "0 <= open_at < full_at <= 1: a skill of 0 is chance, 1 finds every corrupted step"
            )
        for name in ("entropy_floor", "kl_ceiling", "reward_drop"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"SkillGate.{name} is {value}, must be greater than 0, or null for no bound"
                )
        if not 0 <= self.hysteresis < 1:
            raise ValueError(
                f"SkillGate.hysteresis is {self.hysteresis}, must be in [0, 1): 0.25 is usual"
            )

    def opening(self, skill: float, watch: Watch) -> float:
        if watch.harm:
            return 0.0
        return min(max((skill - self.open_at) / (self.full_at - self.open_at), 0.0), 1.0)

    def follow(self, watch: Watch, metrics: Mapping[str, float]) -> Watch:
        if metrics["verifier/none_frac"] == 1:
            return watch  # its mean reward of 0 would be no reward at all
        seen, entropy, reward = watch.updates, metrics["entropy"], metrics["reward"]
        start, mean, best = watch.entropy_start, reward, reward
        if seen < START_UPDATES:
            start += (entropy - start) / (seen + 1)
        if seen:
            mean = REWARD_MEMORY * watch.reward + (1 - REWARD_MEMORY) * reward
            best = max(watch.best_reward, mean)
        known = Watch(seen + 1, start, mean, best)
        strain = self._strain(known, metrics)
        worst = max(strain, key=lambda name: strain[name], default="")
        limit = 1 - self.hysteresis if watch.harm else 1.0
        return replace(known, harm=worst if worst and strain[worst] > limit else "")

    def line(self, skill: float, watch: Watch) -> str:
        if watch.harm:
            return f"gate closed: {watch.harm}; updates are plain GRPO"
        if skill <= self.open_at:
            why = f"step skill {skill:.2f} not over {self.open_at:g}"
            return f"gate closed: {why}; updates are plain GRPO"
        return f"gate open: step skill {skill:.2f} over {self.open_at:g}"

    def _strain(self, watch: Watch, metrics: Mapping[str, float]) -> dict[str, float]:
        """How far each bound is used up, 1 being all of it, by what to tell people."""
        strain, entropy = {}, metrics["entropy"]
        if self.entropy_floor is not None:
            floor = self.entropy_floor * watch.entropy_start
            what = f"policy entropy {entropy:.3g} nats against a floor of {floor:.3g}"
            strain[what] = floor / max(entropy, 1e-9)
        if self.kl_ceiling is not None:
            gap = metrics["sampling/sampling_logp_difference/mean"]
            what = f"log-probabilities {gap:.3g} nats apart against a ceiling of {self.kl_ceiling}"
            strain[what] = gap / self.kl_ceiling
        if self.reward_drop is not None:
            drop = watch.best_reward - watch.reward
            what = f"mean reward {drop:.3g} under its best against a bound of {self.reward_drop}"
            strain[what] = drop / self.reward_drop
        return strain

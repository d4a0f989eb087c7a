"""Step skill, measured while an estimator learns: does its value fall where a fault was put?

An outcome AUC does not tell: it can rise while the estimator forgets which step mattered.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssgrpo_lightning import parallel
from ssgrpo_lightning.functional import counted_generator
from ssgrpo_lightning.interventions import Corruption, Intervened, Intervention, SwapToken
from ssgrpo_lightning.records import Rollouts

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO


PROBE = 1_000_003  # keeps a probe's randomness apart from that of minibatches


@dataclass(frozen=True)
class Probe:
    """When the step skill is measured, on how many successes, corrupted how."""

    every: int = 0
    """Updates between two measurements; 0: only where something else asks for one."""
    rollouts: int = 32
    """Most successes that a measurement corrupts; one of a group, so at most one per problem."""
    corruption: Corruption = SwapToken()
    """What happens to one step of each."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("rollouts", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"model.probe.{name} is {getattr(self, name)}, must be at least {least}: "
                    "every 2 updates on 32 rollouts is usual"
                )

    def __call__(self, module: "SSGRPO", rollouts: Rollouts) -> Intervened | None:
        """Corrupted successes, as read by the policy that sampled them; None if not due."""
        if module.estimator is None or not self._is_due(module):
            return None
        generator = counted_generator(module.seed, module.policy_step, PROBE)
        return intervene(module, rollouts, self.corruption, self.rollouts, generator)

    def _is_due(self, module: "SSGRPO") -> bool:
        stops = module.estimator_patience is not None
        periods = [self.every, module.estimator_every if stops else 0]
        return any(period and module.policy_step % period == 0 for period in periods)


def intervene(
    module: "SSGRPO",
    rollouts: Rollouts,
    intervention: Intervention,
    count: int,
    generator: torch.Generator,
) -> Intervened:
    """Change one step in up to `count` successes and let the policy read them anew."""
    probe = intervention(rollouts, count, generator)
    return replace(probe, changed=module.policy.reread(probe.changed, probe.rows))


def step_skill(module: "SSGRPO", probe: Intervened | None) -> float | None:
    """Step skill as it is now, over all ranks; None where no success could be corrupted."""
    if probe is None:
        return None
    with module.whole():
        found = probe.skill(module.score)
    hits, most = (float(parallel.global_sum(module, x)) for x in found)
    return hits / most if most else None


def note_skill(module: "SSGRPO", probe: Intervened | None) -> dict[str, Tensor]:
    """Measure the step skill if a probe was due; what there is to log."""
    skill = step_skill(module, probe)
    if skill is None or module.estimator is None:
        return {}
    module.estimator.note_skill(skill)
    found = {"skill": skill, "skill_mean": module.estimator.mean_skill}
    return {f"estimator/{name}": torch.tensor(x).clamp(min=0) for name, x in found.items()}

"""Adversarial validation of the estimator: successes it has never seen, corrupted on purpose."""

from typing import Any

import lightning as L

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.functional import counted_generator
from ssgrpo_lightning.interventions import (
    Corruption,
    DeleteStep,
    Intervention,
    RepeatStep,
    SwapStep,
    SwapToken,
)
from ssgrpo_lightning.probing import intervene

ADVERSARIAL = 1_000_033  # keeps this randomness apart from that of the updates


class Adversarial(L.Callback):
    """Every few updates, tries to mislead the estimator on held-out problems.

    Samples groups anew and logs, from successes among them, ``probe/skill_<Corruption>``: how well
    its values find the corrupted step (0 is chance, 1 always); and ``probe/decoy_gain``: how much
    of the change in value lands on a step that stands there twice, over an even share. A good
    estimator keeps it at 1 or below.

    Args:
        every: Updates between two validations; 0: never.
        problems: Held-out problems to sample a group for.
        corruptions: What to do to the successes; null: every one there is.
    """

    def __init__(
        self, every: int = 0, problems: int = 32, corruptions: list[Corruption] | None = None
    ) -> None:
        for field, value, least in (("every", every, 0), ("problems", problems, 2)):
            if value < least:
                raise ValueError(
                    f"adversarial.{field} is {value}, must be at least {least}: every 20 updates "
                    "on 32 problems is usual"
                )
        self.every, self.problems = every, problems
        self.corruptions = [SwapToken(), SwapStep(), DeleteStep()]
        if corruptions is not None:
            self.corruptions = corruptions

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, SSGRPO) or pl_module.estimator is None:
            return
        step = pl_module.policy_step
        if not self.every or step % self.every:
            return
        # Every rank draws the same rollouts from the same policy, so there is nothing to sum.
        found = self.measure(pl_module)
        for logger in trainer.loggers:
            logger.log_metrics({**found, "policy_step": step}, step=step)

    def measure(self, module: SSGRPO) -> dict[str, float]:
        """The metrics; those are left out for which there was no success to change."""
        data = module.datamodule
        held_out = list(data.problems["validation"][: self.problems])
        rollouts = module.collect(held_out, data.group_size, module.sampling)
        asked: dict[str, Intervention] = {
            f"probe/skill_{type(c).__name__}": c for c in self.corruptions
        }
        found = {}
        for name, intervention in {**asked, "probe/decoy_gain": RepeatStep()}.items():
            generator = counted_generator(module.seed, module.policy_step, ADVERSARIAL)
            probe = intervene(module, rollouts, intervention, self.problems, generator)
            measure = probe.skill if isinstance(intervention, Corruption) else probe.gain_share
            share, whole = (float(x) for x in measure(module.score))
            if whole:
                found[name] = share / whole
        return found

"""Warns where many rollouts of an update have no verdict."""

from collections import Counter
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from ssgrpo_lightning.alternation import SSGRPO


class VerifierWatch(L.Callback):
    """Says that verdicts are missing, how many and why, before a run is lost to it.

    A rollout without a verdict teaches nothing, so that a verifier that fails often makes training
    slow, and one that fails on a kind of answer makes it blind there.

    Args:
        none_over: Share of rollouts without a verdict above which to warn.
        every: Warn at most once in this many updates.
    """

    def __init__(self, none_over: float = 0.05, every: int = 10) -> None:
        if not 0 <= none_over <= 1:
            raise ValueError(f"verifier_watch.none_over is {none_over}, must be in [0, 1]")
        if every < 1:
            raise ValueError(f"verifier_watch.every is {every}, must be at least 1")
        self.none_over, self.every = none_over, every
        self.quiet = 0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, SSGRPO):
            return
        self.quiet -= 1
        metrics = outputs["metrics"]
        if self.quiet > 0 or metrics["verifier/none_frac"] <= self.none_over:
            return
        self.quiet = self.every
        missing = [v.reason for v in outputs["rollouts"].verdicts if v.reward is None]
        often = Counter(missing).most_common(1)
        rank_zero_warn(
            f"update {metrics['policy_step']}: {metrics['verifier/none_frac']:.0%} of the rollouts "
            f"have no verdict ({metrics['verifier/killed_frac']:.0%} hit a limit), and teach "
            f"nothing. Most often: {often[0][0] if often else 'on another rank'}. "
            "`python train.py audit --config …` shows what the verifier makes of an answer"
        )

    def state_dict(self) -> dict[str, int]:
        return {"quiet": self.quiet}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.quiet = state_dict["quiet"]

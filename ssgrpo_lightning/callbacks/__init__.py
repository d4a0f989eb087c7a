"""Everything optional around the alternation, as Lightning callbacks."""

from ssgrpo_lightning.callbacks.adversarial import Adversarial
from ssgrpo_lightning.callbacks.collectives import CollectiveCount
from ssgrpo_lightning.callbacks.progress import PhaseBar
from ssgrpo_lightning.callbacks.rollout_log import RolloutLog
from ssgrpo_lightning.callbacks.run import PredictionWriter, RunConfig
from ssgrpo_lightning.callbacks.step_audit import StepAudit
from ssgrpo_lightning.callbacks.verifier_watch import VerifierWatch
from ssgrpo_lightning.callbacks.wandb_run import WandbRun
from ssgrpo_lightning.callbacks.weight_entropy import WeightEntropy

__all__ = [
    "Adversarial",
    "CollectiveCount",
    "PhaseBar",
    "PredictionWriter",
    "RolloutLog",
    "RunConfig",
    "StepAudit",
    "VerifierWatch",
    "WandbRun",
    "WeightEntropy",
]

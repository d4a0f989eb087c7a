"""Rollout engines: prompts in as token ids, completions out as token ids with log-probabilities."""

from ssgrpo_lightning.engines.decode import TransformersEngine
from ssgrpo_lightning.engines.engine import RolloutEngine, Samples, Sampling
from ssgrpo_lightning.engines.vllm import VllmEngine
from ssgrpo_lightning.engines.vllm_server import VllmServer

__all__ = [
    "RolloutEngine",
    "Samples",
    "Sampling",
    "TransformersEngine",
    "VllmEngine",
    "VllmServer",
]

"""Verifiers: one outcome verdict per completion. One abstract class, then its members."""

from ssgrpo_lightning.verifiers.answers import ExactMatch, FinalNumber
from ssgrpo_lightning.verifiers.combined import PythonFunction, Weighted
from ssgrpo_lightning.verifiers.gym import ReasoningGymScore
from ssgrpo_lightning.verifiers.json_schema import JsonSchema, SchemaCheck
from ssgrpo_lightning.verifiers.mathematics import MathAnswer, MathComparison
from ssgrpo_lightning.verifiers.noisy import Noisy
from ssgrpo_lightning.verifiers.patterns import Choice, Matches, PatternCheck
from ssgrpo_lightning.verifiers.pool import Isolated, Pooled
from ssgrpo_lightning.verifiers.tool_calls import ToolCall
from ssgrpo_lightning.verifiers.verifier import Verifier

__all__ = [
    "Choice",
    "ExactMatch",
    "FinalNumber",
    "Isolated",
    "JsonSchema",
    "Matches",
    "MathAnswer",
    "MathComparison",
    "Noisy",
    "PatternCheck",
    "Pooled",
    "PythonFunction",
    "ReasoningGymScore",
    "SchemaCheck",
    "ToolCall",
    "Verifier",
    "Weighted",
]

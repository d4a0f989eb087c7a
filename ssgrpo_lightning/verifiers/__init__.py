"""Verifiers: one outcome verdict per completion. One abstract class, then its members."""

from ssgrpo_lightning.verifiers.answers import ExactMatch, FinalNumber
from ssgrpo_lightning.verifiers.code import PassesTests
from ssgrpo_lightning.verifiers.noisy import Noisy
from ssgrpo_lightning.verifiers.verifier import Verifier

__all__ = ["ExactMatch", "FinalNumber", "Noisy", "PassesTests", "Verifier"]

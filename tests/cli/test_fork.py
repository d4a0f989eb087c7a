"""Fork and adapt: members that live outside the package, named in YAML, with no edit here."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

MINE = '''
"""A researcher's own file."""

from dataclasses import dataclass

import torch

from ssgrpo_lightning.credit import Weighting
from ssgrpo_lightning.objectives import NoisyAnd
from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.segmenters import Segmenter
from ssgrpo_lightning.tasks import Task
from ssgrpo_lightning.verifiers import Verifier


@dataclass(frozen=True)
class Doubling(Task):
    """Twice a number."""

    highest: int = 30
    """Greatest number to double."""

    def problems(self, split):
        offset = {"train": 0, "validation": 100, "test": 200}[split]
        return [Problem(i, f"{i + offset}+{i + offset}=", str(2 * (i + offset)))
                for i in range(1, self.highest + 1)]


@dataclass(frozen=True)
class LengthVerifier(Verifier):
    """Rewards short completions."""

    def __call__(self, completion, problem):
        return Verdict(float(len(completion) % 2), "odd" if len(completion) % 2 else "even")


@dataclass(frozen=True)
class EveryOther(Segmenter):
    """Two tokens a step."""

    def __call__(self, pieces):
        return [i // 2 for i in range(len(pieces))]


@dataclass(frozen=True)
class FirstStep(Weighting):
    """All credit to the first steps."""

    steps: int = 1
    """Steps that get credit."""

    def raw_weights(self, scores):
        index = torch.arange(scores.mask.shape[1])
        return (index < self.steps).float().expand(scores.mask.shape)


@dataclass(frozen=True)
class Halved(NoisyAnd):
    """Half the loss."""

    def loss(self, logits, outcomes):
        return 0.5 * super().loss(logits, outcomes)
'''


def test_members_outside_the_package(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    config = {
        "model": {
            "init_args": {
                "credit": {"class_path": "mine.FirstStep", "init_args": {"steps": 2}},
                "estimator": {"init_args": {"objective": "mine.Halved"}},
            }
        },
        "data": {
            "init_args": {
                "task": {"class_path": "mine.Doubling", "init_args": {"highest": 20}},
                "verifier": "mine.LengthVerifier",
                "segmenter": "mine.EveryOther",
            }
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    before = status()
    overrides = [a for a in small(tmp_path) if not a.startswith("--data.task")]
    result = subprocess.run(
        [
            sys.executable,
            "train.py",
            "fit",
            f"--config={QUICKSTART}",
            f"--config={tmp_path / 'mine.yaml'}",
            *overrides,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len([r for r in metrics(tmp_path) if r["reward"]]) == 2
    assert status() == before


def status() -> str:
    return subprocess.run(
        ["git", "status", "--porcelain"], cwd=Path(REPOSITORY), capture_output=True, text=True
    ).stdout

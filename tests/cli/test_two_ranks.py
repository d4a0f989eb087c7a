"""Two processes against one: the same rollouts, advantages and gradients, and no hang."""

import subprocess
import sys

import pytest

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

# Statistics over the batch and over the tokens of all ranks, which a rank alone would get wrong.
BATCHWIDE = ["--model.advantage=BatchWhitened", "--model.policy.top_entropy=0.5"]
DDP = ["--trainer.devices=2", "--trainer.strategy=ddp_find_unused_parameters_true"]


def test_two_ranks_are_one(tmp_path):
    def arguments(root):
        many = [*small(root), "--data.rollouts_per_update=64", "--data.group_size=8"]
        return ["fit", f"--config={QUICKSTART}", *many, "--data.task.train_problems=64", *BATCHWIDE]

    main(arguments(tmp_path / "one"))
    command = [sys.executable, "train.py", *arguments(tmp_path / "two"), *DDP]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=240)
    one, two = (
        [row for row in metrics(tmp_path / root) if row["grad_norm"]] for root in ("one", "two")
    )
    assert len(one) == len(two) == 2
    for a, b in zip(one, two):
        assert float(a["grad_norm"]) > 0
        for name in ("reward", "grad_norm", "step/adv_mass_ratio", "estimator/loss"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4), name

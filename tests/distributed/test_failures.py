"""An exception on one rank ends all of them, soon, and its message is seen."""

import json
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.conftest import ENVIRONMENT, Job

pytestmark = pytest.mark.distributed
LAUNCHERS = {
    "lightning": [sys.executable, "train.py"],
    "torchrun": [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
        "train.py",
    ],
}


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [("lightning", "fsdp2"), ("torchrun", "ddp_find_unused_parameters_true")],
)
def test_an_exception_on_one_rank_ends_all_within_a_minute(tmp_path, launcher, strategy):
    note = tmp_path / "failed"
    options = [
        "--trainer.devices=2",
        f"--trainer.strategy={strategy}",
        "--model.advantage=tests.distributed.members.FailsOnRankOne",
        f"--model.advantage.note={note}",
    ]
    command = [*LAUNCHERS[launcher], *Job(tmp_path / "run", options).arguments()]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=180
    )
    over = time.time() - json.loads(note.read_text())
    assert done.returncode
    assert "planted: rank 1 cannot make advantages" in done.stdout + done.stderr
    assert over < 60

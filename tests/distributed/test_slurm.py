"""The batch script, with `srun` and `scontrol` that do here what they do on a cluster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, REPOSITORY, metrics, small
from tests.distributed.conftest import ENVIRONMENT

pytestmark = pytest.mark.distributed
SRUN = """#!/usr/bin/env bash
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" & tasks+=($!)
done
echo "${tasks[@]}" > "$ROOM/tasks"
for task in "${tasks[@]}"; do
    code=0; wait "$task" || code=$?
    worst=$((code > worst ? code : worst))
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$ROOM/requeued"
"""
JOB = {"JOB_ID": "4711", "JOB_NAME": "it", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1"}
UPDATES = 12


def submitted(room: Path) -> subprocess.Popen:
    """The batch script on one host with two tasks."""
    environment = {f"SLURM_{name}": value for name, value in JOB.items()}
    path = os.pathsep.join([str(room), str(Path(sys.executable).parent), os.environ["PATH"]])
    options = [
        f"--config={QUICKSTART}",
        *small(room / "run"),
        f"--trainer.max_steps={UPDATES}",
        "--trainer.limit_val_batches=0",
        "--trainer.strategy=fsdp2",
    ]
    return subprocess.Popen(
        ["bash", "configs/slurm.sh", *options],
        cwd=REPOSITORY,
        env={**ENVIRONMENT, **environment, "PATH": path, "ROOM": str(room)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def updates(room: Path) -> list[int]:
    if not list((room / "run").rglob("metrics.csv")):
        return []
    return [int(row["policy_step"]) for row in metrics(room / "run") if row["reward"]]


def test_a_job_whose_time_is_up_comes_again_and_goes_on(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job, end = submitted(tmp_path), time.time() + 120
    while len(updates(tmp_path)) < 2:
        assert time.time() < end and job.poll() is None, job.communicate()[0][-4000:]
        time.sleep(0.05)
    for task in map(int, (tmp_path / "tasks").read_text().split()):
        os.kill(task, signal.SIGUSR1)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said[-4000:]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n", said[-4000:]
    assert 2 <= len(updates(tmp_path)) < UPDATES, said[-4000:]
    job = submitted(tmp_path)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said[-4000:]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert updates(tmp_path) == list(range(1, UPDATES + 1))

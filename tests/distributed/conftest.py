"""Several processes per test: started by torchrun, a list of runs at a time."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, REPOSITORY, small
from tests.distributed.jobs import run

ONE = ["--trainer.devices=1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Job:
    """A run of the quickstart under overlays, in a folder of its own."""

    folder: Path
    options: list[str]
    overlays: tuple[str, ...] = ()
    updates: int = 20

    def arguments(self) -> list[str]:
        configs = [QUICKSTART, *(str(REPOSITORY / f"configs/{name}") for name in self.overlays)]
        return [
            "fit",
            *[f"--config={path}" for path in configs],
            *small(self.folder),
            f"--trainer.max_steps={self.updates}",
            "--trainer.limit_val_batches=0",
            *self.options,
        ]

    def spec(self) -> dict:
        return {"folder": str(self.folder), "arguments": self.arguments()}


def on_one(jobs: list[Job]) -> None:
    """Runs in this process."""
    for job in jobs:
        job.options += ONE
        run(job.spec())


def on_ranks(count: int, jobs: list[Job], folder: Path, timeout: float = 240) -> None:
    """Runs on several processes of this machine."""
    for job in jobs:
        job.options += [f"--trainer.devices={count}"]
    plan = folder / f"jobs{count}.json"
    plan.write_text(json.dumps([job.spec() for job in jobs]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc_per_node={count}", "-m", "tests.distributed.jobs", str(plan)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, timeout=timeout, capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}")


def digests(folder: Path, count: int) -> list[dict[str, str]]:
    """What every rank says of its weights."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]

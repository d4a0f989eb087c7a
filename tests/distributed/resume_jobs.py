"""Program of every rank: runs one after the other, some of which are ended or spoilt on purpose.

Started by torchrun with a JSON file of jobs: ``arguments`` of ``train.py``; ``copy``: folders
``[from, to]`` to copy before; ``signal``: ``[rank, update, phase]`` that gets a SIGUSR1; ``spoil``:
``[rank, update]`` whose loss of the policy is not finite. Every rank writes how its runs ended.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from ssgrpo_lightning.callbacks import VerifierWatch
from ssgrpo_lightning.cli import main
from ssgrpo_lightning.policy_module import PolicyModule

RANK = int(os.environ.get("RANK", "0"))
LOSS = PolicyModule.loss


def prepare(job) -> None:
    sent = job.get("signal")

    def on_phase_start(self, trainer, pl_module, name):
        if sent and [RANK, pl_module.policy_step + 1, name] == sent:
            os.kill(os.getpid(), signal.SIGUSR1)

    def loss(self, batch, divisor):
        value, parts = LOSS(self, batch, divisor)
        bad = job.get("spoil") == [RANK, batch.rollouts.policy_step + 1]
        return (value * float("nan") if bad else value), parts

    VerifierWatch.on_phase_start = on_phase_start  # pyright: ignore[reportAttributeAccessIssue]
    PolicyModule.loss = loss


def run(job) -> int:
    """Exit code of a run."""
    if job.get("copy") and RANK == 0:
        shutil.copytree(*job["copy"])
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    prepare(job)
    try:
        main(job["arguments"])
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        return ended.code
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan = Path(sys.argv.pop(1))
    codes = [run(job) for job in json.loads(plan.read_text())]
    plan.with_name(f"codes{RANK}.json").write_text(json.dumps(codes))

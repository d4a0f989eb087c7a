"""Program of every rank: several runs one after the other, so that torch is imported once.

Started by torchrun with a JSON file: for each job a folder and the arguments of ``train.py``.
Every rank leaves ``rankN.json`` in the folder: digests of its weights, sums of its work.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ssgrpo_lightning.cli import main


def digests(module) -> dict[str, str]:
    """Digest of the weights of policy and estimator as this rank sees them."""
    found = {}
    for name in ("policy", "estimator"):
        child, seen = getattr(module, name), hashlib.sha256()
        for parameter in child.parameters() if child is not None else ():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            seen.update(value.numpy().tobytes())
        found[name] = seen.hexdigest()
    return found


def run(job) -> None:
    folder, rank = Path(job["folder"]), os.environ.get("RANK", "0")
    cli = main(job["arguments"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(digests(cli.model)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv.pop(1)).read_text())
    for job in jobs:
        run(job)

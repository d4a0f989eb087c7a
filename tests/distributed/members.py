"""Members of swap points by import path, for the tests of this folder."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ssgrpo_lightning.advantages import GroupRelative
from ssgrpo_lightning.records import Outcomes


@dataclass(frozen=True)
class FailsOnRankOne(GroupRelative):
    """Fails in the second update, on the second rank alone, and notes when."""

    note: str = ""

    def __call__(self, outcomes: Outcomes):
        calls = _CALLS.setdefault(os.getpid(), []) or _CALLS[os.getpid()]
        calls.append(time.time())
        if dist.get_rank() == 1 and len(calls) == 2:
            Path(self.note).write_text(json.dumps(time.time()))
            raise RuntimeError("planted: rank 1 cannot make advantages")
        return super().__call__(outcomes)


_CALLS: dict[int, list[float]] = {}

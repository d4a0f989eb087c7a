"""Does a run that is killed again and again end like one that never was?

    python -m ssgrpo_lightning.bench.kill --kills 30 --out FILE

A small run in which much is remembered and drawn at random is started, killed with SIGKILL at a
random moment of a phase, resumed with ``--ckpt_path=last``, and so on until it is complete; then it
starts over. Every row of its ``metrics.csv`` is compared with that of an uninterrupted run, to the
last digit of every column but the timings, and so are the weights. ``differences`` must be 0; with
``--plant`` a state is forgotten on purpose, and it must not be.

Processes are forked from one that has imported the package and done nothing else.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import torch

from ssgrpo_lightning import alternation, run_state
from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.callbacks import recovery
from ssgrpo_lightning.checkpoints import WholeFiles, last_of, read
from ssgrpo_lightning.cli import main as command_line
from ssgrpo_lightning.metrics_file import read_rows
from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.verifiers import FinalNumber

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
PHASES = ("start", *alternation.PHASES, "logging", "checkpoint", "validation")
FAULTS = ("python", "numpy", "torch", "waiting")
WIDTH = 12
LR = "{class_path: torch.optim.lr_scheduler.LinearLR, init_args: {total_iters: 20}}"
SETTINGS = {
    "trainer.enable_progress_bar": "false",
    "trainer.val_check_interval": "5",
    "rollout_log.console": "false",
    "recovery.every": "2",
    "data.task.train_problems": "24",
    "data.task.held_out_problems": "8",
    "data.group_size": "4",
    "data.rollouts_per_update": "16",
    "data.verifier": "{class_path: PythonFunction, init_args: "
    "{function: ssgrpo_lightning.bench.kill.judge}}",
    "data.curriculum": "{class_path: DifficultyBuckets, init_args: {low: 0.1, high: 0.9}}",
    "model.collection": "{class_path: DynamicSampling, init_args: {max_tries: 3}}",
    "model.temperature": "FollowsDiversity",
    "model.gate": "SkillGate",
    "model.probe.every": "2",
    "model.minibatches": "2",
    "model.estimator_every": "3",
    "model.policy.sampling.max_new_tokens": "40",
    "model.policy.lr_scheduler": LR,
    "model.policy.beta": "0.01",
    "model.policy.beta_control": "{class_path: AdaptiveBeta, init_args: {target: 0.01}}",
    "model.policy.reference": "{class_path: SlowCopy, init_args: {every: 4}}",
}


def judge(completion: str, problem: Problem) -> float:
    """A verifier of a user's own, which errs by what it draws from the global generators."""
    reward = FinalNumber("#")(completion, problem).reward or 0.0
    drawn = max(random.random(), float(np.random.random()), float(torch.rand(())))
    return reward if drawn < 0.97 else 1 - reward


class Mark:
    """A file that says what a process is doing; what it said last outlives it."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)

    def say(self, phase: str) -> None:
        """Note the phase that begins."""
        os.pwrite(self.file, phase.ljust(WIDTH).encode(), 0)

    def read(self) -> str:
        """The phase noted last."""
        return os.pread(self.file, WIDTH, 0).decode().strip()


class MarkPhases(L.Callback):
    """Notes the phase of a run in a file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.mark = Mark(path)

    def on_phase_start(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> None:
        """Note a phase of an update."""
        self.mark.say(name)

    def on_train_batch_end(self, *_: Any) -> None:
        self.mark.say("logging")

    def on_validation_start(self, *_: Any) -> None:
        self.mark.say("validation")


class MarkFiles(WholeFiles):
    """Notes in a file when a checkpoint is being written.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.mark = Mark(path)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        self.mark.say("checkpoint")
        super().save_checkpoint(checkpoint, path, storage_options)
        self.mark.say("logging")


class Process:
    """A run, started or resumed in a process of its own.

    Args:
        root: Folder of its runs.
        updates: Updates of the whole run.
        plant: State that it forgets on purpose; None: none.
    """

    def __init__(self, root: Path, updates: int, plant: str | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.mark, self.root = Mark(str(root / "phase")), root
        self.mark.say("start")
        self.over, self.pid = False, os.fork()
        if self.pid == 0:
            _run(root, updates, plant)

    def is_over(self) -> bool:
        """Whether it has ended by itself.

        Raises:
            RuntimeError: It failed.
        """
        if not self.over:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.over = bool(pid)
            if status:
                log = (self.root / "log.txt").read_text()[-2000:]
                raise RuntimeError(f"the run in {self.root} failed:\n{log}")
        return self.over

    def wait(self) -> None:
        """Wait until it has ended by itself."""
        while not self.is_over():
            sleep(0.05)

    def kill(self) -> str:
        """End it with SIGKILL; the phase it was in."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return self.mark.read()


def _run(root: Path, updates: int, plant: str | None) -> None:
    """What the forked process does, until it ends."""
    code = 1
    try:
        log = os.open(root / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        mark = str(root / "phase")
        marks = f"{{class_path: {__spec__.name}.NAME, init_args: {{path: {mark}}}}}"
        words = [
            f"--config={QUICKSTART}",
            f"--trainer.default_root_dir={root}",
            f"--trainer.max_steps={updates}",
            f"--trainer.callbacks=[{marks.replace('NAME', 'MarkPhases')}]",
            f"--trainer.plugins=[{marks.replace('NAME', 'MarkFiles')}]",
            *[f"--{name}={value}" for name, value in SETTINGS.items()],
        ]
        with _forgetting(plant):
            command_line(["fit", *words, "--ckpt_path=last"])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def _forgetting(plant: str | None) -> Iterator[None]:
    """Leave a state out when a run is resumed."""
    taken_up = run_state.taken_up

    def restore(state: Mapping[str, Any]) -> None:
        now = run_state.random_state()
        run_state.restore_random({k: now[k] if k == plant else v for k, v in state.items()})

    def forget(module: Any, checkpoint: Mapping[str, Any]) -> None:
        taken_up(module, {**checkpoint, "ssgrpo": {**checkpoint["ssgrpo"], "waiting": []}})

    if plant is None:
        yield
    elif plant == "waiting":
        with patch.object(alternation.run_state, "taken_up", forget):
            yield
    else:
        with patch.object(recovery, "restore_random", restore):
            yield


class Killer:
    """Kills runs in the phases that were hit least so far, at random moments.

    Args:
        seed: Seed of the moments.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hits = Counter[str](dict.fromkeys(PHASES, 0))
        # How long after a phase began it is killed at most; shorter after every miss.
        self.reach: dict[str, float] = dict.fromkeys(PHASES, 0.05)

    def __call__(self, process: Process) -> bool:
        """Kill it; False if it came to its end first."""
        target = min(PHASES, key=lambda phase: (self.hits[phase], self.random.random()))
        # A run has few validations, and one that comes to its end is a start for nothing.
        most = {"start": 0, "validation": 2, "checkpoint": 4}.get(target, 6)
        passes = self.random.randint(min(1, most), most)
        longest = 2.0 if target == "start" else self.reach[target]
        last = process.mark.read()
        while passes or last != target:
            if process.is_over():
                return False
            sleep(0.001)
            now = process.mark.read()
            passes -= now == target != last and passes > 0
            last = now
        sleep(self.random.uniform(0, longest))
        if process.is_over():
            return False
        hit = process.kill()
        self.hits[hit] += 1
        if hit != target and target != "start":
            self.reach[target] /= 2
        return True


def outcome(root: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """Rows of the run below `root` without their timings, and its last weights."""
    last = last_of(root)
    assert last is not None
    rows = read_rows(last.parent.parent / "metrics.csv", 10**6)
    timed = [{k: v for k, v in row.items() if not k.startswith("timing/")} for row in rows]
    state = {k: v for k, v in read(last)["state_dict"].items() if isinstance(v, torch.Tensor)}
    return timed, state


def compare(found: Path, expected: Path) -> tuple[int, list[str]]:
    """Rows compared, and what differs between two runs."""
    (rows, weights), (own, state) = outcome(found), outcome(expected)
    wrong = [f"{len(rows)} rows, not {len(own)}"] if len(rows) != len(own) else []
    for number, (a, b) in enumerate(zip(rows, own)):
        wrong += [f"row {number}, {k}: {a.get(k)}, not {b[k]}" for k in b if a.get(k) != b[k]]
    wrong += [f"weights {k}" for k, x in state.items() if not torch.equal(weights[k], x)]
    return len(own), wrong


def measure(
    root: Path, kills: int, updates: int, seed: int, plant: str | None = None
) -> dict[str, Any]:
    """Kill and resume until `kills` are done and the last run is complete.

    Args:
        root: Folder for the runs.
        kills: Times to kill.
        updates: Updates of a run.
        seed: Seed of the moments.
        plant: State that resumed runs forget on purpose.
    """
    start, killer = monotonic(), Killer(seed)
    gc.freeze()  # forked processes share what was imported
    Process(root / "whole", updates).wait()
    done, torn, rows, number, wrong = 0, 0, 0, 0, list[str]()
    while done < kills:
        number += 1
        folder = root / f"run{number}"
        process = Process(folder, updates, plant)
        while done < kills and killer(process):
            done, torn = done + 1, torn + any(folder.rglob("*.ckpt.partial"))
            print(f"kill {done}: {process.mark.read()}", flush=True)
            process = Process(folder, updates, plant)
        process.wait()
        found = compare(folder, root / "whole")
        rows, wrong = rows + found[0], wrong + found[1]
    return {
        "kills": done,
        "phases_hit": dict(killer.hits),
        "resumes": done,
        "runs": number,
        "killed_with_half_a_checkpoint": torn,
        "rows_compared": rows,
        "differences": len(wrong),
        "first_differences": wrong[:10],
        "seconds": round(monotonic() - start),
    }


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line and return its result."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="times to kill (--quick: 3)")
    parser.add_argument("--updates", type=int, default=24, help="updates of a run (--quick: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--plant", choices=FAULTS, help="state that resumed runs forget")
    given = parser.parse_args(args)
    kills, updates = (3, 8) if given.quick else (given.kills, given.updates)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), kills, updates, given.seed, given.plant)
    finish(result, "differences", given.out)
    return result


if __name__ == "__main__":
    main()

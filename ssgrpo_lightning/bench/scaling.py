"""Weak scaling: seconds of an update on one process, and on several with as much work each."""

import csv
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ssgrpo_lightning.bench.command import arguments, finish

ALONE = "auto"


def update_seconds(folder: Path, first: int) -> list[float]:
    """Seconds of each update of the run in a folder, from update `first` on."""
    (table,) = folder.glob("version_*/metrics.csv")
    with table.open() as file:
        seconds = [float(r["timing/update"]) for r in csv.DictReader(file) if r["timing/update"]]
    return seconds[first:]


def mean_collectives(updates: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """Collectives of an update by phase and name, in the mean over updates.

    >>> mean_collectives([{"policy": {"all_reduce": 1}}, {"policy": {"all_reduce": 2}}])
    {'policy': {'all_reduce': 1.5}}
    """
    sums: dict[str, Counter[str]] = {}
    for update in updates:
        for phase, counts in update.items():
            sums.setdefault(phase, Counter()).update(counts)
    return {
        phase: {name: count / len(updates) for name, count in sorted(counts.items())}
        for phase, counts in sums.items()
    }


def fit(folder: Path, options: list[str]) -> None:
    """Train in a process of its own, or several that it starts; one thread each."""
    command = [sys.executable, "train.py", "fit", *options, f"--trainer.default_root_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def measure(options: Any, ranks: int, strategy: str, folder: Path) -> list[float]:
    """Seconds of updates on some ranks, of as many rollouts each; the first two are left out."""
    fit(folder, [*settings(options, ranks, strategy), f"--trainer.max_steps={options.updates + 2}"])
    return update_seconds(folder, first=2)


def settings(options: Any, ranks: int, strategy: str) -> list[str]:
    """Arguments of ``train.py fit`` but for what is measured."""
    return [
        *(f"--config={config}" for config in options.config),
        f"--data.rollouts_per_update={options.rollouts * ranks}",
        f"--trainer.devices={ranks}",
        f"--trainer.strategy={strategy if ranks > 1 else ALONE}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false",
        "--rollout_log.console=false",
    ]


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--config", nargs="+", default=["configs/quickstart.yaml"])
    parser.add_argument("--strategy", default="fsdp2", help="trainer.strategy of several ranks")
    parser.add_argument("--ranks", type=int, default=2, help="how many are compared with one")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts per update and rank")
    parser.add_argument("--updates", type=int, default=10, help="updates that are timed")
    options = parser.parse_args()
    if options.quick:
        options.updates = min(options.updates, 3)
    seconds = {}
    with TemporaryDirectory() as room:
        for ranks in (1, options.ranks):
            times = measure(options, ranks, options.strategy, Path(room) / f"time{ranks}")
            seconds[ranks] = {"median": statistics.median(times), "all": times}
        listed = Path(room) / "collectives.json"
        count = ["--trainer.callbacks+=CollectiveCount", f"--trainer.callbacks.path={listed}"]
        steps = [*settings(options, options.ranks, options.strategy), "--trainer.max_steps=3"]
        fit(Path(room) / "count", [*steps, *count])
        collectives = mean_collectives(json.loads(listed.read_text()))
    alone, together = seconds[1]["median"], seconds[options.ranks]["median"]
    result = {
        "config": options.config,
        "strategy": options.strategy,
        "ranks": options.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "rollouts_per_rank": options.rollouts,
        "seconds_per_update": {str(ranks): found for ranks, found in seconds.items()},
        "efficiency": alone / together,
        "speedup": options.ranks * alone / together,
        "collectives_per_update": collectives,
        "collectives": sum(sum(names.values()) for names in collectives.values()),
    }
    print(json.dumps(collectives, indent=1))
    finish(result, "speedup", options.out)


if __name__ == "__main__":
    main()

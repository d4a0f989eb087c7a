"""The learning curves of TRL and of our GRPO arm on the same problems; resumes."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ssgrpo_lightning.bench.runs import named
from ssgrpo_lightning.bench.statistics import standard_error
from ssgrpo_lightning.bench.throughput.arms import GRPO, TRL, Worker, Workload, end
from ssgrpo_lightning.bench.throughput.figures import final_reward

ARMS = (TRL, GRPO)
LR = 2e-4  # the quickstart's


def curves(
    workload: Workload, updates: int, seed: int, folder: Path, tick: Callable[[], Any]
) -> dict[str, list[float]]:
    """Mean reward of every update of both arms; from the folder where they are there already."""
    workload = replace(workload, name=f"{workload.name}-seed{seed}", seed=seed)
    path = folder / f"learning-{workload.name}.json"
    asked = {"updates": updates, "workload": json.loads(json.dumps(described(workload)))}
    if path.exists():
        kept = json.loads(path.read_text())
        if {key: kept[key] for key in asked} == asked:
            return kept["rewards"]
    workers = [Worker(arm, workload, updates + 1, folder) for arm in ARMS]
    rewards: dict[str, list[float]] = {arm: [] for arm in ARMS}
    try:
        for worker in workers:
            worker.receive()
        for _ in range(updates):
            # Nothing is timed, so both may work at once.
            for worker in workers:
                worker.ask()
            for worker in workers:
                rewards[worker.arm].append(worker.receive()["reward"])
            tick()
    finally:
        end(workers)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asked | {"rewards": rewards}, indent=1))
    part.replace(path)
    return rewards


def described(workload: Workload) -> dict[str, Any]:
    """A workload as JSON."""
    return {**asdict(workload), "task": named(workload.task), "verifier": named(workload.verifier)}


def compared(found: Mapping[int, Mapping[str, list[float]]]) -> dict[str, Any]:
    """Final rewards of both arms over seeds, and their difference in standard errors.

    The runs are not paired: the arms draw their tokens from different noise.
    """
    arms = {
        arm: {
            "rewards": [run[arm] for run in found.values()],
            "final": [final_reward(run[arm]) for run in found.values()],
        }
        for arm in ARMS
    }
    means = {arm: sum(x["final"]) / len(x["final"]) for arm, x in arms.items()}
    difference, error = means[GRPO] - means[TRL], None
    if len(found) > 1:
        error = math.hypot(*(standard_error(arms[arm]["final"]) for arm in ARMS))
    return {
        "difference": difference,
        "standard_error": error,
        "difference_in_errors": difference / error if error else None,
        "arms": arms,
        "seeds": list(found),
    }

"""One training run of a comparison: what it is, how it is done, where its result is kept."""

import csv
import gc
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.bench.statistics import pass_at_k
from ssgrpo_lightning.cli import main
from ssgrpo_lightning.engines import Sampling
from ssgrpo_lightning.policy import TINY_POLICY
from ssgrpo_lightning.tasks import Task
from ssgrpo_lightning.verifiers import FinalNumber, Noisy, Verifier

PASS_K, SAMPLES, SAMPLED_PROBLEMS, PORTION = 8, 16, 64, 32
RESULT_FIELDS = {"curve", "seconds_per_update", "pass_at_8", "wall_seconds"}


@dataclass(frozen=True)
class Arm:
    """A compared system: the quickstart under an overlay."""

    name: str
    """Short name, that of its overlay in the folder of configs."""
    label: str
    """Name for people."""
    overlay: bool = True
    """Whether it has an overlay; the quickstart as it is has none."""
    seeds: int = 2
    """Seeds it is run with at its best rate."""
    noisy: bool = False
    """Whether it is run under noisy verdicts too."""
    task_field: str = ""
    """Field of its config that must hold the setting's task, for arms that know the task."""


@dataclass(frozen=True)
class Setting:
    """What arms are compared on: the same problems, the same rollouts."""

    name: str
    """Short name."""
    task: Task
    """Where problems come from; held-out ones are its validation split."""
    policy: str = TINY_POLICY
    """Policy that every run starts from: name, folder, or a task of `tiny_policy`, then built."""
    verifier: Verifier = FinalNumber("#")
    """Judges completions; in evaluation always without noise."""
    rollouts_per_update: int = 64
    """Rollouts of one update."""
    group_size: int = 8
    """Rollouts per problem."""
    updates: int = 200
    """Updates of a run."""
    evaluate_every: int = 20
    """Updates between two evaluations."""
    max_new_tokens: int = 64
    """Token budget of a rollout."""
    rates: tuple[float, ...] = (1e-4, 2e-4, 4e-4)
    """Learning rates of the policy that are tried; of a single one no search is made."""
    rates_from: str = ""
    """Earlier setting whose best rates are used, in place of a search; empty: none."""
    flips: tuple[float, ...] = ()
    """Shares of verdicts turned round, besides 0, that noisy arms are run with."""
    arms: tuple[str, ...] = ()
    """Names of the arms that are run; empty: all."""

    def __post_init__(self) -> None:
        if self.updates % self.evaluate_every:
            raise ValueError(
                f"setting {self.name} has updates {self.updates}, must be a multiple of "
                f"evaluate_every ({self.evaluate_every}): its last update would not be evaluated"
            )


@dataclass(frozen=True)
class Run:
    """One training run."""

    setting: Setting
    """What it is trained on."""
    arm: Arm
    """What is trained."""
    rate: float
    """Learning rate of the policy."""
    seed: int
    """Seed of the order of problems, the sampling and the noise of verdicts."""
    flip: float = 0.0
    """Share of verdicts turned round in training."""

    @property
    def name(self) -> str:
        """Name for people and files."""
        noise = f"-flip{self.flip:g}" if self.flip else ""
        return f"{self.setting.name}-{self.arm.name}-rate{self.rate:g}-seed{self.seed}{noise}"

    def configs(self, folder: Path) -> list[Path]:
        """Config files, the later one over the earlier one.

        Raises:
            ValueError: One is missing.
        """
        found = [folder / "quickstart.yaml"]
        found += [folder / f"{self.arm.name}.yaml"] if self.arm.overlay else []
        for path in found:
            if not path.is_file():
                raise ValueError(
                    f"arm {self.arm.name} needs {path}, which is no file: start in the root of "
                    "the repository, set --configs, or leave the arm out of --arms"
                )
        return found

    def arguments(self) -> list[str]:
        """Command-line arguments after the configs: an overlay never changes the setting."""
        setting, verifier = self.setting, self.setting.verifier
        noisy = Noisy(verifier, self.flip, self.seed) if self.flip else verifier
        values = {
            "trainer.max_steps": setting.updates,
            "trainer.val_check_interval": setting.evaluate_every,
            "trainer.enable_progress_bar": False,
            "trainer.enable_checkpointing": False,
            "rollout_log.every": 0,
            "seed_everything": self.seed,
            "model.policy.model.name": setting.policy,
            "model.policy.sampling.max_new_tokens": setting.max_new_tokens,
            "model.policy.optimizer.init_args.lr": self.rate,
            "data.task": named(setting.task),
            "data.verifier": named(noisy),
            "data.evaluation_verifier": named(verifier),
            "data.group_size": setting.group_size,
            "data.rollouts_per_update": setting.rollouts_per_update,
        }
        if self.arm.task_field:
            values[self.arm.task_field] = named(setting.task)
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        return [f"--{key}={value}" for key, value in text.items()]


def named(member: Any) -> Any:
    """A dataclass as configs write it: its class path and arguments; anything else as it is."""
    if not is_dataclass(member):
        return member
    path = f"{type(member).__module__}.{type(member).__qualname__}"
    return {
        "class_path": path,
        "init_args": {f.name: named(getattr(member, f.name)) for f in fields(member) if f.init},
    }


class Results:
    """A folder with one JSON file per finished run, named after all that went into it.

    Args:
        folder: Where the files are.
        configs: Folder of the configs: a changed one makes new runs of its arms.
    """

    def __init__(self, folder: Path, configs: Path) -> None:
        self.folder, self.configs = folder, configs
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, run: Run) -> Path:
        """File of a run."""
        parts = [yaml.safe_load(p.read_text()) for p in run.configs(self.configs)]
        text = json.dumps([parts, run.arguments()], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return self.folder / f"{run.name}-{digest}.json"

    def load(self, run: Run) -> dict[str, Any] | None:
        """Result of a finished run; None where there is none.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.path(run)
        if not path.exists():
            return None
        try:
            result = json.loads(path.read_text())
            lacking = RESULT_FIELDS - result.keys()
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}): its run is done again") from error
        if lacking:
            raise ValueError(f"{path} lacks {sorted(lacking)}: its run is done again")
        return result

    def save(self, run: Run, result: Mapping[str, Any]) -> None:
        """Keep a result: a file appears whole or not at all."""
        path = self.path(run)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        part.replace(path)


def start_worker(log: Path) -> None:
    """Prepare a process for runs: one thread, and what libraries print goes to a file."""
    torch.set_num_threads(1)
    sys.argv = sys.argv[:1]  # LightningCLI warns where it is given arguments beside these
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def execute(run: Run, configs: Path, folder: Path) -> dict[str, Any]:
    """Train and measure.

    Args:
        run: The run.
        configs: Folder of the configs.
        folder: Folder for the logs of the run; what it holds is lost.

    Raises:
        ValueError: The command line refused the run.
    """
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    arguments = [f"--config={path}" for path in run.configs(configs)] + run.arguments()
    try:
        model = main(["fit", *arguments, f"--trainer.default_root_dir={folder}"]).model
    except SystemExit as refusal:
        raise ValueError(str(refusal)) from refusal
    assert isinstance(model, SSGRPO)
    with (folder / "version_0" / "metrics.csv").open() as file:
        result = measured(csv.DictReader(file), run.setting.rollouts_per_update)
    result |= sampled(model)
    result |= {"arguments": arguments, "wall_seconds": time.perf_counter() - start}
    # Trainer and module refer to each other; a worker does many runs.
    del model
    gc.collect()
    return result


def measured(rows: Iterable[Mapping[str, str]], rollouts_per_update: int) -> dict[str, Any]:
    """What the metrics of a run say: its curve, a point an evaluation, and its cost.

    Seconds are those of updates; evaluation does not count. Reward and entropy of a point are
    means over the updates since the last one.
    """
    curve, since = [], []
    seconds, calls, tokens = [], [], 0
    for row in rows:
        if row.get("reward"):
            since.append(row)
            seconds.append(float(row["timing/update"]))
            calls.append(float(row.get("estimator/calls_per_rollout") or 0))
            tokens = int(float(row["num_tokens"]))
        if row.get("val/accuracy"):
            curve.append(
                {
                    "rollouts": round(float(row["policy_step"])) * rollouts_per_update,
                    "tokens": tokens,
                    "seconds": sum(seconds),
                    "accuracy": float(row["val/accuracy"]),
                    "reward": _mean(since, "reward"),
                    "entropy": _mean(since, "entropy"),
                }
            )
            since = []
    return {
        "curve": curve,
        "training_seconds": sum(seconds),
        "seconds_per_update": float(torch.tensor(seconds).median()),
        "calls_per_rollout": sum(calls) / len(calls),
    }


def _mean(rows: list[Mapping[str, str]], field: str) -> float | None:
    return sum(float(row[field]) for row in rows) / len(rows) if rows else None


@torch.no_grad()
def sampled(model: SSGRPO) -> dict[str, float]:
    """Pass@8 and the entropy of the policy in nats, at temperature 1 on held-out problems."""
    problems = model.datamodule.problems["validation"][:SAMPLED_PROBLEMS]
    sampling = Sampling(model.policy.sampling.max_new_tokens, temperature=1.0)
    passed, entropy, tokens = [], 0.0, 0
    for start in range(0, len(problems), PORTION):
        part = problems[start : start + PORTION]
        rollouts = model.collect(part, SAMPLES, sampling, model.datamodule.evaluation_judge)
        right = (rollouts.rewards == 1).view(len(part), SAMPLES).sum(1).tolist()
        passed += [pass_at_k(SAMPLES, count, PASS_K) for count in right]
        entropy += float(rollouts.entropy.sum())
        tokens += int(rollouts.sampled.sum())
    return {"pass_at_8": sum(passed) / len(passed), "sampled_entropy": entropy / max(tokens, 1)}

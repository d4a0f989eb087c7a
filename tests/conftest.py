"""Small real objects shared by the tests: the shipped policy, chosen rollouts, the CLI."""

import csv
from pathlib import Path

import pytest
import torch
import wandb

from ssgrpo_lightning.engines import Samples, Sampling, TransformersEngine
from ssgrpo_lightning.policy import Policy, Pretrained
from ssgrpo_lightning.records import Problem, Rollouts, Verdict
from ssgrpo_lightning.rollouts import Judge, assemble, collect
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.tiny_prm import classifier, separator
from ssgrpo_lightning.verifiers import FinalNumber

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = str(REPOSITORY / "configs/quickstart.yaml")
NAN = float("nan")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # The models are too small for two, and other work on the machine then costs less.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _bare_command_line(monkeypatch):
    # LightningCLI warns where both a list and sys.argv hold arguments.
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.fixture(autouse=True)
def _no_wandb_run_left_over():
    # A logger made while a run is in progress writes into that run.
    yield
    if wandb.run is not None:
        wandb.finish()


@pytest.fixture(scope="session")
def policy() -> Policy:
    """The shipped policy; no test changes its weights."""
    return Pretrained().load()


@pytest.fixture(scope="session")
def task() -> ChainArithmetic:
    return ChainArithmetic(train_problems=64, held_out_problems=16)


@pytest.fixture(scope="session")
def rollouts(policy, task) -> Rollouts:
    """Eight groups of four, sampled from the shipped policy; some groups are mixed."""
    problems = task.problems("train")[:8]
    judge = Judge(FinalNumber("#"), ByLine())
    return collect(policy, TransformersEngine(), judge, problems, 4, Sampling(48), 0, 0)


@pytest.fixture(scope="session")
def prms(tmp_path_factory) -> Path:
    """A folder like ``runs``, with untrained process reward models under the configs' names."""
    folder = tmp_path_factory.mktemp("runs")
    classifier(Pretrained(), folder / "prm")
    separator(Pretrained(), folder / "prm_separator")
    return folder


@pytest.fixture
def make_rollouts():
    """Rollouts of chosen rewards and step lengths, with arbitrary tokens: two groups by default."""

    def make(rewards, lengths=None, group=None, prompt=3, seed=0) -> Rollouts:
        generator = torch.Generator().manual_seed(seed)
        count = len(rewards)
        lengths = lengths or [[2, 3]] * count
        group = group or [i * 2 // count for i in range(count)]
        steps = [[s for s, n in enumerate(row) for _ in range(n)] for row in lengths]
        width = max(map(len, steps))
        samples = Samples(
            tokens=torch.randint(2, 17, (count, width), generator=generator),
            lengths=torch.tensor([len(s) for s in steps]),
            logprobs=-torch.rand(count, width, generator=generator) * 2,
            entropy=torch.rand(count, width, generator=generator),
            truncated=torch.zeros(count, dtype=torch.bool),
        )
        return assemble(
            prompts=[[3, 12, 4][:prompt]] * count,
            samples=samples,
            steps=steps,
            verdicts=[Verdict(r) for r in rewards],
            group=group,
            problems=[Problem(g, "1+2=", "3") for g in group],
            texts=["1+2=3"] * count,
            pad_id=0,
            policy_step=0,
        )

    return make


def small(root: Path) -> list[str]:
    """Overrides that make the quickstart a matter of seconds."""
    return [
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false",
        "--data.rollouts_per_update=16",
        "--data.group_size=4",
        "--data.task.train_problems=32",
        "--data.task.held_out_problems=8",
        "--model.policy.sampling.max_new_tokens=40",
        "--rollout_log.console=false",
    ]


def run_folder(root: Path) -> Path:
    """The newest run folder below `root`."""
    return max(root.glob("version_*"), key=lambda p: int(p.name.split("_")[1]))


def metrics(root: Path) -> list[dict[str, str]]:
    """Rows of the newest run's metrics.csv."""
    with (run_folder(root) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))

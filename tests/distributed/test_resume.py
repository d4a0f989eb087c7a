"""Resuming on two processes, with another number of them, and with another strategy."""

import json
import os
import subprocess
import sys

import pytest

from ssgrpo_lightning.bench.kill import SETTINGS
from tests.conftest import QUICKSTART, REPOSITORY, metrics
from tests.distributed.resume_jobs import run

pytestmark = pytest.mark.distributed
DDP = "--trainer.strategy=ddp_find_unused_parameters_true"
STRATEGIES = {"one": [], "ddp": [DDP], "fsdp2": ["--trainer.strategy=fsdp2"]}
# Two updates wait for the estimator phase in the fourth; a validation comes after the fifth.
PART, CROSSED, WHOLE = 3, 5, 7
# Without what each rank draws or fills up for itself, so that their number changes nothing.
PLAIN = {
    **SETTINGS,
    "data.verifier": "{class_path: FinalNumber, init_args: {marker: '#'}}",
    "model.collection": "OneBatch",
    "model.minibatches": 1,
    "model.gate": "FixedGate",
    "model.probe.every": 0,
}


# What each rank says of its own rollouts or problems, and the log holds of one or by rank.
OF_ONE_RANK = ("val/reward", "val/mean_length", "val/clipped_ratio", "step/top10_text_share",
               "step/within_variance_share", "sampling/importance_sampling_ratio/min")  # fmt: skip


def job(root, kind, steps, settings=PLAIN, **more):
    """A run below `root`, resumed where that holds a checkpoint."""
    given = {**settings, "trainer.default_root_dir": root, "trainer.max_steps": steps}
    words = [f"--{name}={value}" for name, value in given.items()]
    devices = f"--trainer.devices={1 if kind == 'one' else 2}"
    config = f"--config={QUICKSTART}"
    arguments = ["fit", config, *words, devices, *STRATEGIES[kind], "--ckpt_path=last"]
    return {"arguments": arguments, **more}


def from_to(folder, old, new):
    """Goes on with another strategy where a run of `old` stopped."""
    copy = [str(folder / f"{old}/part"), str(folder / f"{old}-{new}")]
    return job(copy[1], new, CROSSED, copy=copy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    for each in (job(folder / "one/whole", "one", CROSSED), job(folder / "one/part", "one", PART)):
        run(each)
    jobs = [
        job(folder / "drawn/whole", "ddp", WHOLE, SETTINGS),
        # The end of update 5, after which a validation is due, in the middle of which only rank 1
        # hears of it; then on to the end.
        job(folder / "drawn/run", "ddp", PART, SETTINGS),
        job(folder / "drawn/run", "ddp", WHOLE, SETTINGS, signal=[1, 5, "policy"]),
        job(folder / "drawn/run", "ddp", WHOLE, SETTINGS),
        job(folder / "spoilt", "ddp", PART, spoil=[1, 2]),
        job(folder / "ddp/part", "ddp", PART),
        job(folder / "fsdp2/part", "fsdp2", PART),
        *[from_to(folder, old, new) for old in STRATEGIES for new in ("ddp", "fsdp2")],
    ]
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(jobs, default=str))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.distributed.resume_jobs", str(plan)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    for old in ("ddp", "fsdp2"):
        run(from_to(folder, old, "one"))
    return folder


def assert_same(found, expected, updates, tolerance, aside=()):
    found, expected = metrics(found), metrics(expected)
    assert len(found) == len(expected) == updates + 2
    for a, b in zip(found, expected):
        for name, value in b.items():
            if name.startswith("timing/") or name in aside:
                continue
            if not value:
                assert not a[name], name
            else:
                assert float(a[name]) == pytest.approx(
                    float(value), rel=tolerance, abs=tolerance
                ), (b["policy_step"], name)


def test_two_ranks_go_on_as_if_they_had_never_ended(folder):
    assert_same(folder / "drawn/run", folder / "drawn/whole", WHOLE, 1e-6)


def test_a_signal_to_one_rank_ends_both_with_a_code_that_says_so(folder):
    codes = [json.loads((folder / f"codes{rank}.json").read_text()) for rank in (0, 1)]
    # Another code than 0 on rank 1 would let a launcher kill rank 0.
    assert codes[0][:4] == [0, 0, 75, 0] and set(codes[1]) == {0}


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_both(folder):
    rows = [row for row in metrics(folder / "spoilt") if row["reward"]]
    assert [float(row["skipped_steps"]) for row in rows] == [0, 1, 0]
    assert all(float(row["grad_norm"]) == float(row["grad_norm"]) for row in rows)


@pytest.mark.parametrize("new", STRATEGIES)
@pytest.mark.parametrize("old", STRATEGIES)
def test_a_run_goes_on_with_another_strategy_and_number_of_ranks(folder, old, new):
    if (old, new) != ("one", "one"):  # which is tested to the last bit elsewhere
        assert_same(folder / f"{old}-{new}", folder / "one/whole", CROSSED, 1e-4, OF_ONE_RANK)

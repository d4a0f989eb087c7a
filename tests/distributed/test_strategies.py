"""Two and four processes against one: the same losses and gradients, on DDP and on FSDP2."""

import math

import pytest

from tests.conftest import metrics
from tests.distributed.conftest import Job, digests, on_one, on_ranks

pytestmark = pytest.mark.distributed
STRATEGIES = {"ddp": "ddp_find_unused_parameters_true", "fsdp2": "fsdp2"}
# Micro-batches of so few tokens that ranks have different numbers of them.
FEW = ["--model.policy.micro_batch_tokens=64"]
ALGORITHMS = {
    "ssgrpo": ((), FEW),
    "causal_steps": (("causal_steps.yaml",), []),
    "lora": (("lora.yaml",), []),
    # Two optimiser steps per update, a reference copy, old log-probabilities of their own.
    "grpo": (
        ("grpo.yaml",),
        ["--model.policy.beta=0.05", "--model.minibatches=2", "--model.inner_epochs=1"],
    ),
}
NAMES = ("reward", "policy_loss", "grad_norm", "entropy", "estimator/loss", "estimator/grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of every algorithm: on one process, then on two and on four with either strategy."""
    folder = tmp_path_factory.mktemp("strategies")
    jobs = lambda where, *more: [  # noqa: E731
        Job(folder / where / name, [*options, *more], overlays)
        for name, (overlays, options) in ALGORITHMS.items()
    ]
    on_one(jobs("one"))
    for count in (2, 4):
        several = [
            job
            for name, strategy in STRATEGIES.items()
            for job in jobs(f"{name}{count}", f"--trainer.strategy={strategy}")
        ]
        on_ranks(count, several, folder)
    return folder


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_learn_what_one_process_learns(folder, strategy, count, algorithm):
    one = metrics(folder / "one" / algorithm)
    many = metrics(folder / f"{strategy}{count}" / algorithm)
    assert len(one) == len(many) == 20
    seen = 0
    for step, (a, b) in enumerate(zip(one, many)):
        for name in NAMES:
            if not a.get(name):
                continue
            seen += 1
            close = math.isclose(float(b[name]), float(a[name]), rel_tol=1e-5, abs_tol=1e-5)
            assert close, (step, name, a[name], b[name])
    assert seen >= 80
    assert any(float(row["grad_norm"]) > 0 for row in one)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_hold_the_same_weights(folder, strategy, count, algorithm):
    found = digests(folder / f"{strategy}{count}" / algorithm, count)
    assert all(rank == found[0] for rank in found)

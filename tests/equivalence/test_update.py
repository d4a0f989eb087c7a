"""One update, seen from outside: what it must leave the same, and what it must change."""

import pytest
import torch

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, metrics, small

SGD = "--model.policy.optimizer={class_path: torch.optim.SGD, init_args: {lr: 1.0}}"
ONE = ["--trainer.max_steps=1", "--trainer.val_check_interval=1"]


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit(root, *args):
    """Run the quickstart in small; returns the trained model."""
    return main(["fit", f"--config={QUICKSTART}", *small(root), *args]).model


def test_broadcast_gate_zero_and_weight_one_are_the_same_run_bit_for_bit(tmp_path):
    broadcast = fit(tmp_path / "a", "--model.credit=Broadcast")
    closed = fit(tmp_path / "b", "--model.credit={class_path: ValueGain, init_args: {gate: 0}}")
    flat = fit(tmp_path / "c", "--model.credit={class_path: ValueGain, init_args: {k: 0}}")
    assert broadcast.estimator is None and closed.estimator is not None
    assert torch.equal(weights(broadcast.policy), weights(closed.policy))
    assert torch.equal(weights(broadcast.policy), weights(flat.policy))


def test_the_gate_changes_something(tmp_path):
    closed = fit(tmp_path / "a", "--model.credit={class_path: ValueGain, init_args: {gate: 0}}")
    opened = fit(tmp_path / "b", "--model.credit={class_path: ValueGain, init_args: {gate: 1}}")
    assert not torch.equal(weights(closed.policy), weights(opened.policy))


@pytest.mark.parametrize(
    "reduction", ["Dapo", "Grpo", "{class_path: DrGrpo, init_args: {max_tokens: 40}}"]
)
def test_one_gradient_for_every_split_of_an_optimiser_step(tmp_path, reduction):
    splits = [
        ["--model.policy.micro_batch=16"],
        ["--model.policy.micro_batch=16", "--model.policy.layout=Padded"],
        ["--model.policy.micro_batch=1"],
        ["--model.policy.micro_batch=3", "--model.policy.layout=Packed"],
        ["--model.policy.micro_batch_tokens=150"],
        ["--model.policy.gradient_checkpointing=true", "--model.policy.head_chunk=50"],
    ]
    runs = [
        fit(
            tmp_path / str(index),
            *ONE,
            SGD,
            "--model.policy.max_grad_norm=1e9",
            f"--model.policy.reduction={reduction}",
            *split,
        )
        for index, split in enumerate(splits)
    ]
    start = weights(runs[0].policy.model.load())
    whole = weights(runs[0].policy) - start
    assert whole.norm() > 1e-3
    for run, split in zip(runs, splits, strict=True):
        difference = (weights(run.policy) - start) - whole
        assert difference.norm() < 1e-5 * whole.norm(), split


def test_one_estimator_gradient_for_every_split(tmp_path):
    sgd = "--model.estimator.optimizer={class_path: torch.optim.SGD, init_args: {lr: 1.0}}"
    runs = [
        fit(
            tmp_path / str(groups),
            *ONE,
            sgd,
            "--model.estimator.max_grad_norm=1e9",
            f"--model.estimator.micro_batch_groups={groups}",
        )
        for groups in (1, 4)
    ]
    a, b = (weights(run.estimator) for run in runs)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_each_phase_moves_its_own_parameters_only(tmp_path):
    still = fit(tmp_path / "a", "--model.policy.optimizer.init_args.lr=0")
    assert torch.equal(weights(still.policy), weights(still.policy.model.load()))
    moved = fit(
        tmp_path / "b",
        "--model.estimator.optimizer.init_args.lr=0",
        "--model.estimator.optimizer.init_args.weight_decay=0",
    )
    assert not torch.equal(weights(moved.policy), weights(still.policy))
    assert not torch.equal(weights(moved.estimator), weights(still.estimator))
    # The estimator at rate 0 is the one it started as.
    torch.manual_seed(0)
    untouched = fit(
        tmp_path / "c",
        "--model.estimator.optimizer.init_args.lr=0",
        "--model.estimator.optimizer.init_args.weight_decay=0",
        *ONE,
    )
    assert torch.equal(weights(moved.estimator), weights(untouched.estimator))


def test_the_first_ratio_is_exactly_one(tmp_path, monkeypatch):
    from ssgrpo_lightning.policy_module import PolicyModule

    ratios, loss = [], PolicyModule.loss

    def spy(self, batch, divisor):
        logprobs, _ = self.forward(batch.rollouts)
        ratios.append((logprobs - batch.old).exp()[batch.rollouts.sampled])
        return loss(self, batch, divisor)

    monkeypatch.setattr(PolicyModule, "loss", spy)
    fit(tmp_path, *ONE, "--model.inner_epochs=2", "--model.policy.micro_batch=4")
    half = len(ratios) // 2
    assert half >= 1
    assert all((r == 1).all() for r in ratios[:half])  # before the first optimiser step
    assert all((r != 1).any() for r in ratios[half:])  # after it


def test_the_policy_that_sampled_is_the_one_that_trains(tmp_path, monkeypatch):
    from ssgrpo_lightning.alternation import SSGRPO

    seen, phase = [], SSGRPO.policy_phase

    def spy(self, batch):
        everyone = [torch.arange(len(batch.rollouts))]
        gap = self.policy.logprobs(batch.rollouts, everyone) - batch.rollouts.logprobs
        seen.append((batch.rollouts.policy_step, self.policy_step, float(gap.abs().max())))
        return phase(self, batch)

    monkeypatch.setattr(SSGRPO, "policy_phase", spy)
    fit(tmp_path, "--trainer.max_steps=4", "--model.policy.optimizer.init_args.lr=1e-3")
    assert [s[:2] for s in seen] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert max(s[2] for s in seen) < 1e-4


def test_no_usable_token_means_no_step_and_no_weight_decay(tmp_path):
    # At a temperature near 0 the rollouts of a group are all alike: every group is dead.
    adam = "{class_path: torch.optim.AdamW, init_args: {lr: 0.1, weight_decay: 0.5}}"
    decay = f"--model.policy.optimizer={adam}"
    run = fit(tmp_path, decay, "--model.policy.sampling.temperature=1e-4")
    assert torch.equal(weights(run.policy), weights(run.policy.model.load()))
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert all(float(r["frac_reward_zero_std"]) == 1 for r in rows)
    assert all(float(r["grad_norm"]) == 0 for r in rows)


def test_kl_holds_the_policy_and_beta_zero_loads_no_reference(tmp_path):
    free = fit(tmp_path / "a", SGD, "--model.policy.beta=0")
    held = fit(tmp_path / "b", SGD, "--model.policy.beta=0.5")
    assert free.policy.anchor.copy is None and held.policy.anchor.copy is not None
    own = [n for n, _ in held.policy.named_parameters() if not n.startswith("anchor")]
    difference = [
        not torch.equal(
            dict(held.policy.named_parameters())[n], dict(free.policy.named_parameters())[n]
        )
        for n in own
    ]
    assert any(difference)
    assert torch.equal(weights(held.policy.anchor.copy), weights(held.policy.model.load()))


def test_minibatches_make_several_steps_and_change_the_result(tmp_path):
    one = fit(tmp_path / "a", *ONE)
    two = fit(tmp_path / "b", *ONE, "--model.minibatches=2")
    assert not torch.equal(weights(one.policy), weights(two.policy))


def test_the_estimator_phase_runs_first_and_then_every_n_updates(tmp_path):
    fit(tmp_path, "--trainer.max_steps=5", "--model.estimator_every=2")
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [bool(r["estimator/loss"]) for r in rows] == [True, False, True, False, True]


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(tmp_path):
    def run(name, seed):
        fit(tmp_path / name, f"--seed_everything={seed}", "--trainer.max_steps=3")
        return [
            {k: v for k, v in row.items() if not k.startswith("timing/")}
            for row in metrics(tmp_path / name)
        ]

    first = run("a", 0)
    assert first == run("b", 0)
    assert first != run("c", 1)

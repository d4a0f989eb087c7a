"""Critics in whole runs: warm-up, old values, resuming."""

import pytest
import torch

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.objectives import ValueRegression
from tests.conftest import QUICKSTART, REPOSITORY, metrics, run_folder, small

CRITICS = [str(REPOSITORY / f"configs/{name}.yaml") for name in ("critic", "critic_shared")]
both = pytest.mark.parametrize("config", CRITICS)


def fit(root, config, *args):
    return main(["fit", f"--config={QUICKSTART}", f"--config={config}", *small(root), *args]).model


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@both
def test_in_the_warm_up_the_critic_learns_and_the_policy_stays_bit_for_bit(tmp_path, config):
    run = fit(tmp_path, config, "--model.warmup_updates=1", "--trainer.max_steps=1")
    start = weights(run.policy.model.load())
    assert torch.equal(weights(run.policy), start)
    *_, bias = run.estimator.estimator.head.parameters()
    assert bias.any()  # it started at 0
    (row,) = [r for r in metrics(tmp_path) if r["reward"]]
    assert (row["policy_step"], float(row["warmup"]), float(row["grad_norm"])) == ("1", 1, 0)
    after = fit(tmp_path, config, "--model.warmup_updates=1", "--trainer.max_steps=2")
    assert not torch.equal(weights(after.policy), start)
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [float(r["warmup"]) for r in rows] == [1, 0] and float(rows[1]["grad_norm"]) > 0


def test_the_loss_sees_the_values_from_before_the_critic_learnt(tmp_path, monkeypatch):
    seen, loss = [], ValueRegression.loss

    def spy(self, logits, scores):
        now = logits.detach().sigmoid()
        old = torch.cat([scores.baseline[:, None], scores.values], 1)
        mask = torch.nn.functional.pad(scores.mask, (1, 0), value=True)
        seen.append((now[mask], old[mask]))
        return loss(self, logits, scores)

    monkeypatch.setattr(ValueRegression, "loss", spy)
    fit(tmp_path, CRITICS[0], "--trainer.max_steps=2", "--model.estimator_epochs=2")
    assert len(seen) == 4
    for first, second in (seen[:2], seen[2:]):
        torch.testing.assert_close(first[0], first[1], atol=1e-5, rtol=0)
        assert torch.equal(second[1], first[1])
        assert not torch.allclose(second[0], second[1], atol=1e-4)


@both
def test_resuming_keeps_the_critic(tmp_path, config):
    fit(tmp_path, config, "--trainer.max_steps=1")
    checkpoint = run_folder(tmp_path) / "checkpoints/last.ckpt"
    stored = torch.load(checkpoint, weights_only=True)["state_dict"]
    resumed = fit(
        tmp_path,
        config,
        "--trainer.max_steps=2",
        f"--ckpt_path={checkpoint}",
        "--model.estimator_every=5",
    )
    state = {f"estimator.{name}": x for name, x in resumed.estimator.state_dict().items()}
    names = [n for n in stored if n.startswith("estimator.estimator.")]
    assert names and all(torch.equal(state[n], stored[n]) for n in names)
    assert not any("policy" in n for n in names)

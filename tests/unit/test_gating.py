"""The gate opens with skill, closes on harm, and is plain GRPO while it is closed."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.credit import Broadcast, ValueGain
from ssgrpo_lightning.estimator_module import BestEpoch, EstimatorModule
from ssgrpo_lightning.estimators import CausalSteps, Estimator
from ssgrpo_lightning.gating import FixedGate, SkillGate, Watch
from tests.conftest import QUICKSTART, REPOSITORY, metrics, run_folder, small

SKILL_GATE = f"--config={REPOSITORY / 'configs/skill_gate.yaml'}"
CAUSAL = f"--config={REPOSITORY / 'configs/causal_steps.yaml'}"
# Enough rollouts that some succeed, and their steps can be swapped.
WIDE = "--data.rollouts_per_update=64"
ALL_ONE = {
    "entropy": 1.0,
    "reward": 0.5,
    "verifier/none_frac": 0.0,
    "sampling/sampling_logp_difference/mean": 0.0,
}


class Clueless(Estimator):
    """Learns, but says the same of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(1.0))

    def forward(self, rollouts):
        return self.bias.expand(len(rollouts), rollouts.steps)


def followed(gate, *updates):
    watch = Watch()
    for update in updates:
        watch = gate.follow(watch, ALL_ONE | update)
    return watch


def test_the_opening_grows_with_skill():
    gate = SkillGate(open_at=0.1, full_at=0.5)
    assert [gate.opening(s, Watch()) for s in (-0.2, 0.1, 0.5, 0.9)] == [0, 0, 1, 1]
    assert gate.opening(0.3, Watch()) == pytest.approx(0.5)
    assert gate.acting(ValueGain(gate=0.5), 0.3, Watch()).gate == pytest.approx(0.25)


def test_a_fixed_gate_and_a_rule_without_one_stay_as_they_are():
    for gate in (0.0, 0.1, 0.25, 1.0):
        assert FixedGate().acting(ValueGain(gate=gate), 0.0, Watch()) == ValueGain(gate=gate)
    assert SkillGate().acting(Broadcast(), 1.0, Watch()) == Broadcast()
    assert FixedGate().follow(Watch(), ALL_ONE) == Watch()
    assert FixedGate().line(0.0, Watch()) == ""


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        ({"entropy": 0.19}, "policy entropy"),
        ({"sampling/sampling_logp_difference/mean": 0.11}, "log-probabilities"),
        ({"reward": -0.6}, "mean reward"),  # the running mean falls by a tenth of 1.1
    ],
)
def test_each_harm_closes_the_gate_whatever_the_skill(harm, word):
    gate = SkillGate(entropy_floor=0.2, kl_ceiling=0.1, reward_drop=0.1)
    start = [{}] * 10
    assert followed(gate, *start).harm == ""
    watch = followed(gate, *start, harm)
    assert watch.harm.startswith(word)
    assert gate.opening(1.0, watch) == 0
    assert gate.line(1.0, watch).startswith("gate closed: ")
    open_end = replace(gate, entropy_floor=None, kl_ceiling=None, reward_drop=None)
    assert followed(open_end, *start, harm).harm == ""


def test_the_gate_opens_again_only_with_room_to_spare():
    gate = SkillGate(entropy_floor=0.2, hysteresis=0.25)
    updates = [{}] * 10 + [{"entropy": 0.19}]
    # 0.2 / 0.75 = 0.267: above the floor is not enough.
    assert followed(gate, *updates, {"entropy": 0.25}).harm
    assert not followed(gate, *updates, {"entropy": 0.27}).harm
    # What was never under the floor may lie right above it.
    assert not followed(gate, *updates[:10], {"entropy": 0.21}).harm


def test_the_start_is_the_mean_of_the_first_updates_and_the_best_reward_is_kept():
    watch = followed(SkillGate(), *({"entropy": 0.8 + 0.1 * (i % 2)} for i in range(10)), {})
    assert watch.entropy_start == pytest.approx(0.85)
    watch = followed(SkillGate(), {"reward": 0.4}, {"reward": 0.5}, {"reward": 0.0})
    assert watch.best_reward == pytest.approx(0.41)
    assert watch.reward == pytest.approx(0.9 * 0.41)


def test_an_update_without_any_verdict_is_no_fall_of_the_reward():
    watch = followed(SkillGate(), {})
    silent = {"reward": 0.0, "verifier/none_frac": 1.0}
    assert SkillGate().follow(watch, ALL_ONE | silent) == watch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"open_at": 0.6}, "open_at 0.6 and full_at 0.5"),
        ({"entropy_floor": 0.0}, "entropy_floor is 0.0, must be greater than 0"),
        ({"hysteresis": 1.0}, "hysteresis is 1.0, must be in"),
    ],
)
def test_a_bad_gate_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SkillGate(**fields)


def test_skill_has_to_be_earned_and_is_saved_with_the_weights():
    module = EstimatorModule(torch.optim.AdamW, CausalSteps(hidden=16))
    module.note_skill(1.0)
    assert module.mean_skill == pytest.approx(0.1)
    module.note_skill(-0.2)
    assert module.mean_skill == pytest.approx(0.09 - 0.02)
    other = EstimatorModule(torch.optim.AdamW, CausalSteps(hidden=16))
    other.load_state_dict(module.state_dict())
    assert other.mean_skill == module.mean_skill


@pytest.mark.parametrize(
    ("skills", "passes", "kept"),
    [
        ([0.1, 0.5, 0.4, 0.3, 0.9], 4, 2),
        ([0.5, 0.4, 0.5, 0.4, 0.6], 5, 5),
        ([0.5, None, 0.4, None, 0.3], 5, 1),
    ],
)
def test_early_stopping_keeps_the_pass_with_the_greatest_skill(skills, passes, kept):
    module, left = EstimatorModule(torch.optim.AdamW, Clueless()), iter(skills)
    best, made = BestEpoch(module, 2, lambda: next(left)), 0
    for made in range(1, len(skills) + 1):
        module.estimator.bias.data.fill_(float(made))
        if best.is_over():
            break
    best.restore()
    assert (made, float(module.estimator.bias)) == (passes, kept)


def test_without_patience_nothing_is_measured():
    module = EstimatorModule(torch.optim.AdamW, Clueless())
    best = BestEpoch(module, None, lambda: pytest.fail("measured"))
    assert not best.is_over()
    best.restore()
    assert float(module.estimator.bias) == 1


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit(root, *args):
    return main(["fit", f"--config={QUICKSTART}", *small(root), WIDE, *args]).model


def test_without_skill_the_run_is_grpo_bit_for_bit_and_the_estimator_learns(tmp_path, caplog):
    grpo = fit(tmp_path / "a", f"--config={REPOSITORY / 'configs/grpo.yaml'}")
    clueless = "--model.estimator.estimator=tests.unit.test_gating.Clueless"
    gated = fit(tmp_path / "b", SKILL_GATE, clueless, "--model.probe.every=1")
    assert torch.equal(weights(grpo.policy), weights(gated.policy))
    assert float(gated.estimator.estimator.bias) != 1
    rows = [r for r in metrics(tmp_path / "b") if r["reward"]]
    assert [float(r["step/gate"]) for r in rows] == [0, 0]
    assert [float(r["estimator/skill"]) for r in rows] == [0, 0]
    told = caplog.text
    assert told.count("gate closed: step skill") == 1 and "plain GRPO" in told


def test_with_skill_it_is_not(tmp_path, caplog):
    grpo = fit(tmp_path / "a", f"--config={REPOSITORY / 'configs/grpo.yaml'}")
    eager = ["--model.gate.init_args.open_at=0", "--model.probe.every=1"]
    gated = fit(tmp_path / "b", CAUSAL, SKILL_GATE, *eager)
    assert not torch.equal(weights(grpo.policy), weights(gated.policy))
    assert "gate open: step skill" in caplog.text


def test_a_probe_changes_nothing_but_the_log(tmp_path):
    plain, probed = fit(tmp_path / "a"), fit(tmp_path / "b", "--model.probe.every=2")
    assert torch.equal(weights(plain), weights(probed))
    rows = [r for r in metrics(tmp_path / "b") if r["reward"]]
    assert [bool(r["estimator/skill"]) for r in rows] == [True, False]
    assert "estimator/skill" not in metrics(tmp_path / "a")[-1]


def test_what_the_gate_remembers_survives_a_resume_exactly(tmp_path):
    common = ["fit", f"--config={QUICKSTART}", *small(tmp_path), WIDE, SKILL_GATE]
    common += ["--model.probe.every=1", "--model.gate.init_args.open_at=0"]
    first = main([*common, "--trainer.max_steps=2"]).model
    checkpoint = run_folder(tmp_path) / "checkpoints/last.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["ssgrpo"]["watch"]
    assert saved == asdict(first.watch) and saved["updates"] == 2 and saved["best_reward"] > 0
    resumed = main([*common, "--trainer.max_steps=4", f"--ckpt_path={checkpoint}"]).model
    whole = main([*common, "--trainer.max_steps=4"]).model
    assert resumed.watch == whole.watch and resumed.watch.updates == 4
    assert resumed.estimator.mean_skill == whole.estimator.mean_skill != 0
    assert torch.equal(weights(resumed), weights(whole))


def test_a_phase_with_patience_runs_and_measures(tmp_path):
    fit(tmp_path, "--model.estimator_epochs=3", "--model.estimator_patience=1")
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert all(r["estimator/skill"] for r in rows)


def test_adversarial_validation_logs_every_corruption_and_the_decoy(tmp_path):
    fit(tmp_path, "--adversarial.every=2", "--adversarial.problems=8")
    names = {"SwapToken", "SwapStep", "DeleteStep"}
    (row,) = [r for r in metrics(tmp_path) if r["probe/decoy_gain"]]
    assert {n for n in row if n.startswith("probe/skill_")} == {f"probe/skill_{n}" for n in names}
    assert row["policy_step"] == "2" and float(row["probe/decoy_gain"]) >= 0


def test_a_probe_does_not_count_as_calls_of_the_update(tmp_path):
    exact = f"--config={REPOSITORY / 'configs/exact_credit.yaml'}"
    fit(tmp_path / "a", exact)
    fit(tmp_path / "b", exact, "--model.probe.every=1")
    plain, probed = (
        [r["estimator/calls_per_rollout"] for r in metrics(tmp_path / name) if r["reward"]]
        for name in ("a", "b")
    )
    assert plain == probed and float(plain[0]) > 1

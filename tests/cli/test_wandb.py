"""An offline W&B run, read back: keys, axis, table, config; and the dashboard's metrics."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from ssgrpo_lightning.callbacks import dashboard
from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, REPOSITORY, small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Records of one offline run: the history rows, the summary and the config."""
    root = tmp_path_factory.mktemp("wandb")
    patch = pytest.MonkeyPatch()
    patch.setenv("WANDB_MODE", "offline")
    patch.setattr("sys.argv", ["train.py"])
    try:
        main(
            [
                "fit",
                f"--config={QUICKSTART}",
                f"--config={REPOSITORY / 'configs/wandb.yaml'}",
                *small(root),
                f"--trainer.logger.init_args.save_dir={root}",
                "--rollout_log.every=1",
                "--wandb_run.every=1",
                "--trainer.max_steps=3",
            ]
        )
        wandb.finish()
    finally:
        patch.undo()
    (file,) = root.glob("wandb/offline-run-*/run-*.wandb")
    wandb_command = shutil.which("wandb", path=str(Path(sys.executable).parent))

    def read(*options):
        text = subprocess.run(
            [wandb_command, "leet", "inspect", "--json", *options, str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    return file.parent, read()


def history(records) -> list[dict]:
    """The logged rows, keys as W&B keeps them."""
    return [r["history"]["item"] for r in records if r["type"] == "history"]


def test_every_metric_of_the_dashboard_was_logged(run):
    _, records = run
    # Media are logged as several keys: name._type, name.path, …
    logged = {key.split(".")[0] for row in history(records) for key in row}
    assert not dashboard.metrics() - logged, sorted(logged)
    assert {"step/advantage_by_position", "step/weights"} <= logged  # histograms


def test_the_axis_never_goes_back_and_every_row_has_it(run):
    _, records = run
    steps = [float(row["policy_step"]) for row in history(records)]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 3
    axes = [r["metric"] for r in records if r["type"] == "metric"]
    assert axes[-1]["glob_name"] == "*" and axes[-1]["step_metric"] == "policy_step"


def test_the_table_keeps_its_history_and_the_config_is_there(run):
    folder, records = run
    tables = sorted(folder.glob("files/media/table/rollouts*.json"))
    rows = [row for t in tables for row in json.loads(t.read_text())["data"]]
    assert {row[0] for row in rows} == {1, 2, 3}
    (config,) = [
        r["config"]["update"]["cli"]
        for r in records
        if "cli" in r.get("config", {}).get("update", {})
    ]
    assert config["data"]["init_args"]["group_size"] == 4


def test_the_dashboard_is_built_without_network():
    pytest.importorskip("wandb_workspaces")
    workspace = dashboard.build("someone", "some-project")
    titles = [
        panel.title for s in workspace.sections for panel in s.panels if hasattr(panel, "title")
    ]
    assert "Accuracy on held-out problems" in titles

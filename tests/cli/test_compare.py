"""The comparison through its real command, two updates a run."""

import json
import subprocess
import sys

from tests.conftest import REPOSITORY


def command(out):
    arguments = ["--quick", "--arms=grpo,ours", f"--out={out}", "--jobs=1"]
    return subprocess.run(
        [sys.executable, "-m", "ssgrpo_lightning.bench.compare", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )


def test_quick_comparison_and_its_resumption(tmp_path):
    command(tmp_path)
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["missing"] == []
    for arm in found["settings"]["quick"]["arms"].values():
        assert [p[0] for p in arm["curves"]["rollouts"]] == [0, 16, 32]
        assert 0 <= arm["pass_at_8"] <= 1 and arm["sampled_entropy"] > 0
    assert [row["flip"] for row in found["settings"]["quick"]["noise"]] == [0.0, 0.1]

    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("quick-*.json")}
    assert len(kept) == 4
    damaged = min(kept)
    before = json.loads(damaged.read_text())
    damaged.write_text(damaged.read_text()[:40])
    told = command(tmp_path)
    assert f"{damaged} is damaged" in told.stdout + told.stderr
    again = {path for path, time in kept.items() if path.stat().st_mtime_ns != time}
    assert again == {damaged}
    curves = (x["curve"] for x in (before, json.loads(damaged.read_text())))
    first, second = ([(p["tokens"], p["accuracy"]) for p in curve] for curve in curves)
    assert first == second

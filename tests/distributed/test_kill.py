"""Killed in any phase and resumed, a run ends like one left alone; a planted fault shows."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("plant", [[], ["--plant=python"]], ids=["whole", "planted"])
def test_kills_leave_no_trace_unless_a_state_is_forgotten(tmp_path, plant):
    out = tmp_path / "kill.json"
    bench = [sys.executable, "-m", "ssgrpo_lightning.bench.kill", f"--out={out}"]
    subprocess.run(
        [*bench, "--kills=5", "--updates=8", *plant],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    result = json.loads(out.read_text())
    assert result["kills"] == result["resumes"] == sum(result["phases_hit"].values()) == 5
    # A start, eight updates and the validation after the fifth.
    assert result["rows_compared"] == result["runs"] * 10 > 0
    assert (result["differences"] > 0) == bool(plant), result["first_differences"]

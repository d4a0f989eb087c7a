"""The table of metrics outlives kills, resumes and full disks."""

import csv
from pathlib import Path

import pytest

from ssgrpo_lightning.metrics_file import MetricsFile, Table, read_rows


def rows(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_row_is_on_the_disk_at_once_and_columns_may_come_in_later(tmp_path):
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"a": 1.5}, step=1)
    assert rows(logger.log_dir) == [{"a": "1.5", "step": "1"}]
    logger.log_metrics({"b": 2}, step=2)
    logger.log_metrics({"a": 3.0, "b": 4}, step=3)
    assert rows(logger.log_dir) == [
        {"a": "1.5", "b": "", "step": "1"},
        {"a": "", "b": "2", "step": "2"},
        {"a": "3.0", "b": "4", "step": "3"},
    ]
    assert logger.experiment.written == 3


def test_a_resumed_run_goes_on_behind_the_rows_of_its_checkpoint(tmp_path):
    first = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        first.log_metrics({"a": step / 3}, step=step)
    kept = read_rows(Path(first.log_dir) / "metrics.csv", 2)
    again = MetricsFile(tmp_path, 0, kept)
    assert again.log_dir == first.log_dir and again.experiment.written == 2
    again.log_metrics({"a": 1.0, "c": 1}, step=3)
    found = rows(first.log_dir)
    assert [row["step"] for row in found] == ["1", "2", "3"]
    # Digits are those that were written, not read and written again.
    assert [row["a"] for row in found] == [str(1 / 3), str(2 / 3), "1.0"]
    branch = MetricsFile(tmp_path, None, kept)
    branch.log_metrics({"a": 9.0}, step=3)
    assert len(rows(branch.log_dir)) == 3 and branch.version == 1
    assert rows(first.log_dir) == found


def test_half_a_row_of_a_killed_run_is_no_row(tmp_path):
    table = Table(str(tmp_path))
    table.log_metrics({"a": 1.0, "b": 2.0}, 1)
    table.save()
    with table.path.open("a") as file:
        file.write("7.")
    assert read_rows(table.path, table.written) == [{"a": "1.0", "b": "2.0", "step": "1"}]


def test_rows_wait_while_they_cannot_be_written(tmp_path, monkeypatch):
    table = Table(str(tmp_path))
    table.log_metrics({"a": 1.0}, 1)
    table.save()
    real = csv.DictWriter.writerows

    def fails_half_way(writer, given):
        writer.writer.writerow(["half", "a"])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", fails_half_way)
    table.log_metrics({"a": 2.0}, 2)
    with pytest.warns(UserWarning, match="No space left on device.*wait in memory"):
        table.save()
    monkeypatch.setattr(csv.DictWriter, "writerows", real)
    table.log_metrics({"a": 3.0}, 3)
    table.save()
    assert [row["a"] for row in rows(tmp_path)] == ["1.0", "2.0", "3.0"]

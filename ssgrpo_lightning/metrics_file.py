"""``metrics.csv``: a table that outlives kills and full disks, and goes on where a run resumes."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_warn

Row = Mapping[str, Any]


class MetricsFile(CSVLogger):
    """Lightning's CSV logger, but every row is on the disk at once and none is lost or doubled.

    Lightning's keeps up to 100 rows in memory, deletes the file of a run that goes on, and writes
    all of it anew, in place, where a column comes in.

    Args:
        save_dir: Folder of the runs.
        version: Number of the run; null: the next one.
        rows: What the table begins with: the rows of the run that is resumed.
    """

    def __init__(
        self, save_dir: str | Path, version: int | None = None, rows: Sequence[Row] = ()
    ) -> None:
        super().__init__(save_dir, name="", version=version, flush_logs_every_n_steps=1)
        self.rows = rows

    @property
    @rank_zero_experiment
    def experiment(self) -> "Table":
        """The table."""
        if not isinstance(self._experiment, Table):
            self._experiment = Table(self.log_dir, self.rows)
        return self._experiment


class Table(ExperimentWriter):
    """Rows on the disk, rows that wait, and the columns of all.

    Args:
        log_dir: Folder of the run; what ``metrics.csv`` there held is replaced.
        rows: What the table begins with.
    """

    def __init__(self, log_dir: str, rows: Sequence[Row] = ()) -> None:
        self.path = Path(log_dir) / self.NAME_METRICS_FILE
        super().__init__(log_dir)
        self.metrics = [dict(row) for row in rows]
        self.written, self.size = 0, 0
        self.save()

    def _check_log_dir_exists(self) -> None:
        return  # Lightning's deletes the rows there

    def save(self) -> None:
        """Write the rows that wait; where that fails, people are told, and they wait on."""
        if not self.metrics:
            return
        columns = sorted({*self.metrics_keys, *(name for row in self.metrics for name in row)})
        try:
            self._append() if columns == self.metrics_keys else self._rewrite(columns)
        except OSError as error:
            rank_zero_warn(f"{self.path} was not written ({error}): its rows wait in memory")
        else:
            self.written, self.metrics = self.written + len(self.metrics), []

    def _append(self) -> None:
        with self.path.open("r+", newline="") as file:
            file.seek(self.size)
            file.truncate()  # half a row, if writing failed before
            csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
            file.flush()
            self.size = file.tell()

    def _rewrite(self, columns: list[str]) -> None:
        rows = read_rows(self.path, self.written) if self.written else []
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows([*rows, *self.metrics])
            file.flush()
            size = file.tell()
        partial.replace(self.path)
        self.metrics_keys, self.size = columns, size


def read_rows(path: Path, count: int) -> list[dict[str, str]]:
    """The first `count` rows of a table, or as many as there are."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row, _ in zip(csv.DictReader(file), range(count))]

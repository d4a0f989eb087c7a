"""Problems from columns: JSON lines, CSV or Parquet files, or a dataset of the Hugging Face hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssgrpo_lightning.records import Message, Problem
from ssgrpo_lightning.tasks.task import Split, Task

PACKAGE = "pkg://"
SAMPLES = PACKAGE + "ssgrpo_lightning/tasks/samples/"
Row = Mapping[str, Any]

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class TableTask(Task):
    """Rows with a column of prompts and a column of answers.

    A prompt is text or a list of chat messages. With `chat`, text becomes one user message (after
    `system`, where given) and the policy's chat template renders it.
    """

    train: str
    """File (.jsonl, .json, .csv, .parquet) or ``hub-name:split`` of the training rows."""
    validation: str
    """The same for validation."""
    test: str | None = None
    """The same for the test; None: the validation rows."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column that holds the reference answer."""
    chat: bool = False
    """Render prompts with the policy's chat template."""
    system: str | None = None
    """System message that opens every chat."""
    suffix: str = ""
    """Text added to every prompt, such as how to state the answer."""
    limit: int | None = None
    """Read at most this many rows of each split; None: all."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError(
                f"TableTask.system is {self.system!r} but TableTask.chat is false, so it would be "
                "ignored: set chat to true or remove system"
            )

    def problems(self, split: Split) -> list[Problem]:
        sources = {"train": self.train, "validation": self.validation}
        source = sources.get(split) or self.test or self.validation
        rows = _read(source, f"{type(self).__name__}.{split}")
        for column in self.columns():
            if column not in rows.column_names:
                raise ValueError(
                    f"{type(self).__name__}: {source} has no column {column!r}, it has "
                    f"{rows.column_names}: set prompt_column and answer_column to two of these"
                )
        if self.limit is not None:
            rows = rows.select(range(min(self.limit, len(rows))))
        found = []
        for i, row in enumerate(rows.to_list()):
            where = f"row {i} of {source}"
            found.append(Problem(i, self._prompt(row, where), self.answer(row, where)))
        return found

    def question(self, row: Row) -> Any:
        """What the row asks: text, or chat messages."""
        return row[self.prompt_column]

    def answer(self, row: Row, where: str) -> str:
        """The reference answer of a row; `where` names the row in an error."""
        return str(row[self.answer_column])

    def columns(self) -> tuple[str, ...]:
        """Columns that every source must have."""
        return (self.prompt_column, self.answer_column)

    def _prompt(self, row: Row, where: str) -> str | tuple[Message, ...]:
        asked = self.question(row)
        if isinstance(asked, str):
            text = asked + self.suffix
            if not self.chat:
                return text
            opening = [{"role": "system", "content": self.system}] if self.system else []
            return (*opening, {"role": "user", "content": text})
        if isinstance(asked, list) and all(isinstance(m, Mapping) for m in asked):
            return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in asked)
        raise ValueError(
            f"{type(self).__name__}: {where} has {asked!r} in column {self.prompt_column!r}, "
            "must be text or a list of messages with role and content: mend or drop the row"
        )


def _read(source: str, field: str) -> Any:
    """Rows of a file or of a hub dataset, as a `datasets.Dataset`."""
    # Imported here because it takes a second, which commands without a table need not pay.
    import datasets

    path = _path(source)
    if path.suffix in _READERS:
        if not path.is_file():
            raise ValueError(
                f"{field} is {source!r}, which is no file: give the path of a "
                f"{', '.join(_READERS)} file, or hub-name:split"
            )
        return datasets.load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
    name, _, hub_split = source.rpartition(":")
    if not name:
        raise ValueError(
            f"{field} is {source!r}: give a {', '.join(_READERS)} file, or "
            "hub-name:split such as openai/gsm8k:train"
        )
    name, _, config = name.partition("#")
    return datasets.load_dataset(name, config or None, split=hub_split)


def _path(source: str) -> Path:
    """A path as it is, or that of a file inside an installed package."""
    if not source.startswith(PACKAGE):
        return Path(source)
    package, _, inside = source.removeprefix(PACKAGE).partition("/")
    if find_spec(package) is None:
        raise ValueError(f"{source!r} names a file of {package!r}, which is not installed")
    return Path(str(files(package).joinpath(inside)))

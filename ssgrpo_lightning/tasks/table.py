"""Problems from columns: JSON lines, CSV or Parquet files, or a dataset of the Hugging Face hub."""

import random
import re
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
_SLICE = re.compile(r"(.*?)(?:\[(\d*):(\d*)\])?", re.DOTALL)


@dataclass(frozen=True)
class TableTask(Task):
    """Rows with a column of prompts and a column of answers.

    A prompt is text or a list of chat messages. With `chat`, text becomes one user message (after
    `system`, where given) and the policy's chat template renders it.

    A source is a file (.jsonl, .json, .csv, .parquet), ``pkg://package/path`` for a file that a
    package carries, or ``hub-name:split``, with a config as ``hub-name#config:split``. Behind it
    may stand the rows to take, counted from 0: ``a.jsonl[100:]``, ``openai/gsm8k#main:train[:9]``.

    With `shots`, worked examples stand before every question. They are rows of the training source
    that `seed` picks, and never the question that is asked.
    """

    train: str
    """Source of the training rows."""
    validation: str
    """Source of the validation rows."""
    test: str | None = None
    """Source of the test rows; None: the validation rows."""
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
    shots: int = 0
    """Worked examples before the question: turns of the chat, or text; 0: zero-shot."""
    solution_column: str | None = None
    """Column with the solution that an example shows; None: the answer column."""
    limit: int | None = None
    """Read at most this many rows of each split; None: all."""
    streaming: bool = False
    """Read only the rows that are needed, one after the other: for what is too large to hold. The
    first `limit` rows are kept, so that every split has a length; an epoch is these rows."""
    shuffle_buffer: int = 0
    """Rows from which streaming draws the next at random, by `seed`; 0: in the order of the file.
    Of training rows only: held-out rows stay the same whatever the seed."""
    seed: int = 0
    """Seed of examples and of the shuffled stream."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.system is not None and not self.chat:
            raise ValueError(
                f"{name}.system is {self.system!r} but {name}.chat is false, so it would be "
                "ignored: set chat to true or remove system"
            )
        if self.streaming and self.limit is None:
            raise ValueError(
                f"{name}.streaming is true and {name}.limit is null: a stream has no length, and "
                "training needs one, so set limit to the rows to keep of each split"
            )
        if self.shuffle_buffer and not self.streaming:
            raise ValueError(
                f"{name}.shuffle_buffer is {self.shuffle_buffer} but {name}.streaming is false, so "
                "it would be ignored: set streaming to true, or shuffle_buffer to 0"
            )
        for field, least in (("shots", 0), ("shuffle_buffer", 0), ("limit", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"{name}.{field} is {value}, must be at least {least}: raise it")

    def problems(self, split: Split) -> list[Problem]:
        source = self._source(split)
        rows = self._rows(split)
        examples = self._examples(rows if split == "train" else None)
        found = []
        for i, row in enumerate(rows):
            where = f"row {i} of {source}"
            prompt = self._prompt(row, examples, where)
            found.append(Problem(i, prompt, self.answer(row, where), self.metadata(row, where)))
        return found

    def question(self, row: Row) -> Any:
        """What the row asks: text, or chat messages."""
        return row[self.prompt_column]

    def answer(self, row: Row, where: str) -> str:
        """The reference answer of a row; `where` names the row in an error."""
        return str(row[self.answer_column])

    def solution(self, row: Row) -> str:
        """What a worked example shows after its question."""
        return str(row[self.solution_column or self.answer_column])

    def opening(self, row: Row, where: str) -> str | None:
        """The system message of a row's chat, if it has one."""
        return self.system

    def metadata(self, row: Row, where: str) -> dict[str, Any]:
        """What else the verifier needs of a row."""
        return {}

    def columns(self) -> tuple[str, ...]:
        """Columns that every source must have."""
        shown = (self.solution_column,) if self.shots and self.solution_column else ()
        return (self.prompt_column, self.answer_column, *shown)

    def keeps(self, row: Row) -> bool:
        """Whether a row is part of the task."""
        return True

    def _source(self, split: Split) -> str:
        sources = {"train": self.train, "validation": self.validation}
        return sources.get(split) or self.test or self.validation

    def _rows(self, split: Split) -> list[Row]:
        source = self._source(split)
        buffer = self.shuffle_buffer if split == "train" else 0
        rows = _read(source, f"{type(self).__name__}.{split}", self.streaming, buffer, self.seed)
        kept: list[Row] = []
        for row in rows:
            for column in self.columns():
                if column not in row:
                    raise ValueError(
                        f"{type(self).__name__}: {source} has no column {column!r}, it has "
                        f"{list(row)}: set prompt_column and answer_column to two of these"
                    )
            if self.keeps(row):
                kept.append(row)
            if len(kept) == self.limit:
                break
        if not kept:
            raise ValueError(
                f"{type(self).__name__}.{split} is {source!r}, which has no row for this task: "
                "give a source with rows, or mend the fields that choose among them"
            )
        return kept

    def _examples(self, train: list[Row] | None) -> list[Row]:
        """One training row more than is shown, so that a question is never its own example."""
        if not self.shots:
            return []
        rows = list({str(self.question(r)): r for r in train or self._rows("train")}.values())
        if len(rows) <= self.shots:
            raise ValueError(
                f"{type(self).__name__}.shots is {self.shots}, which needs {self.shots + 1} "
                f"different training questions, but {self.train} has {len(rows)}: lower shots"
            )
        return random.Random(self.seed).sample(rows, self.shots + 1)

    def _prompt(self, row: Row, examples: list[Row], where: str) -> str | tuple[Message, ...]:
        asked = self.question(row)
        if isinstance(asked, list) and all(isinstance(m, Mapping) for m in asked):
            if examples:
                raise ValueError(
                    f"{type(self).__name__}.shots is {self.shots}, but {where} is a chat of its "
                    "own: set shots to 0, or give questions as text"
                )
            return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in asked)
        if not isinstance(asked, str):
            raise ValueError(
                f"{type(self).__name__}: {where} has {asked!r} in column {self.prompt_column!r}, "
                "must be text or a list of messages with role and content: mend or drop the row"
            )
        others = [e for e in examples if self.question(e) != asked][: self.shots]
        shown = [(self.question(e) + self.suffix, self.solution(e)) for e in others]
        if not self.chat:
            return "".join(f"{q}{s}\n\n" for q, s in shown) + asked + self.suffix
        system = self.opening(row, where)
        opening = [{"role": "system", "content": system}] if system else []
        turns = [
            {"role": role, "content": text}
            for pair in shown
            for role, text in zip(("user", "assistant"), pair)
        ]
        return (*opening, *turns, {"role": "user", "content": asked + self.suffix})


def _read(source: str, field: str, streaming: bool, buffer: int, seed: int) -> Any:
    """Rows of a source, as a `datasets.Dataset`, or an `IterableDataset` where streamed."""
    # Imported here because it takes a second, which commands without a table need not pay.
    import datasets

    found = _SLICE.fullmatch(source)
    assert found is not None  # the pattern matches any text
    start, stop = int(found[2] or 0), int(found[3]) if found[3] else None
    path = _path(found[1])
    if path.suffix in _READERS:
        if not path.is_file():
            raise ValueError(
                f"{field} is {source!r}, which is no file: give the path of a "
                f"{', '.join(_READERS)} file, or hub-name:split"
            )
        arguments: dict[str, Any] = {
            "path": _READERS[path.suffix],
            "data_files": str(path),
            "split": "train",
        }
    else:
        name, _, split = found[1].partition(":")
        if not name or not split:
            raise ValueError(
                f"{field} is {source!r}: give a {', '.join(_READERS)} file, or "
                "hub-name:split such as openai/gsm8k#main:train"
            )
        name, _, config = name.partition("#")
        arguments = {"path": name, "name": config or None, "split": split}
    rows: Any = datasets.load_dataset(**arguments, streaming=streaming)
    if streaming:
        rows = rows.skip(start)
        rows = rows if stop is None else rows.take(max(stop - start, 0))
        return rows.shuffle(seed=seed, buffer_size=buffer) if buffer else rows
    return rows.select(list(range(len(rows))[start:stop]))


def _path(source: str) -> Path:
    """A path as it is, or that of a file inside an installed package."""
    if not source.startswith(PACKAGE):
        return Path(source)
    package, _, inside = source.removeprefix(PACKAGE).partition("/")
    if find_spec(package) is None:
        raise ValueError(f"{source!r} names a file of {package!r}, which is not installed")
    return Path(str(files(package).joinpath(inside)))

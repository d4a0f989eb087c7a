"""Code: a description, and hidden tests that a Python function or program must pass."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ssgrpo_lightning.sandbox.suite import ProgramTest, Suite, free_names
from ssgrpo_lightning.tasks.table import SAMPLES, Row, TableTask


class CodeLayout(ABC):
    """How a table writes a question and its tests."""

    columns: ClassVar[tuple[str, ...]]
    """Columns that it reads."""

    @abstractmethod
    def question(self, row: Row) -> str:
        """What is asked."""

    @abstractmethod
    def suite(self, row: Row) -> Suite:
        """The hidden tests.

        Raises:
            ValueError: They are not of this layout.
        """


@dataclass(frozen=True)
class HiddenTests(CodeLayout):
    """Columns ``prompt`` and ``tests``, where tests are JSON text: a list, or a whole `Suite`.

    A test is ``{"call": name, "args": [...], "expected": value}``, ``{"stdin": ..., "stdout":
    ...}``, or ``{"program": source with assertions, "calls": [names under test]}``.
    """

    columns: ClassVar[tuple[str, ...]] = ("prompt", "tests")

    def question(self, row: Row) -> str:
        return row["prompt"]

    def suite(self, row: Row) -> Suite:
        text = str(row["tests"])
        return Suite.read(f'{{"tests": {text}}}' if text.lstrip().startswith("[") else text)


@dataclass(frozen=True)
class HumanEval(CodeLayout):
    """Columns of HumanEval (Chen et al., 2107.03374): prompt, entry_point, test.

    The prompt is source that stands before the completion, which may go on with it or write the
    whole function again.
    """

    columns: ClassVar[tuple[str, ...]] = ("prompt", "entry_point", "test")

    def question(self, row: Row) -> str:
        return row["prompt"]

    def suite(self, row: Row) -> Suite:
        # Helpers of the prompt come along, so that the code under test cannot replace them.
        program = f"{row['prompt']}\n{row['test']}\ncheck(candidate)\n"
        free_names(program)
        return Suite((ProgramTest(program, ["candidate"], row["entry_point"]),), row["prompt"])


@dataclass(frozen=True)
class Mbpp(CodeLayout):
    """Columns of MBPP (Austin et al., 2108.07732): text, test_list, test_setup_code."""

    columns: ClassVar[tuple[str, ...]] = ("text", "test_list", "test_setup_code")

    shown: int = 1
    """Tests of the list that the question shows, since only they name the function."""

    def question(self, row: Row) -> str:
        shown = "\n".join(row["test_list"][: self.shown])
        return f"{row['text']}\nYour code should pass this test:\n{shown}" if shown else row["text"]

    def suite(self, row: Row) -> Suite:
        tests = []
        for test in row["test_list"]:
            program = f"{row['test_setup_code']}\n{test}\n"
            tests.append(ProgramTest(program, free_names(program)))
        return Suite(tuple(tests))


@dataclass(frozen=True)
class CodeTask(TableTask):
    """Rows with a question and hidden tests, judged by `PassesTests`; see `TableTask` for sources.

    The tests become the reference answer, as JSON. Without a source it is a small sample that the
    package carries, of functions that a small model can write.
    """

    train: str = SAMPLES + "code_train.jsonl"
    """Source of the training rows."""
    validation: str = SAMPLES + "code_validation.jsonl"
    """Source of the validation rows."""
    layout: CodeLayout = HiddenTests()
    """How the rows write question and tests."""

    def columns(self) -> tuple[str, ...]:
        return self.layout.columns

    def question(self, row: Row) -> str:
        return self.layout.question(row)

    def answer(self, row: Row, where: str) -> str:
        try:
            answer = self.layout.suite(row).dump()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"CodeTask: {where} is not of the layout {type(self.layout).__name__}: {error}"
            ) from error
        Suite.read(answer)
        return answer

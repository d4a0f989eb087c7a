"""GSM8K and MATH: word problems with worked solutions, whose answers are read as published."""

import re
from dataclasses import dataclass

from ssgrpo_lightning.extraction import after_hashes, last_boxed
from ssgrpo_lightning.tasks.table import Row, TableTask

_CALCULATOR = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Gsm8k(TableTask):
    """Grade-school word problems in the form of GSM8K (Cobbe et al., 2110.14168).

    Its authors publish a training and a test split; the last 512 training rows are the validation
    rows here. Examples show the worked solution without the calculator's ``<<…>>``.
    """

    train: str = "openai/gsm8k#main:train[:6961]"
    """Source of the training rows."""
    validation: str = "openai/gsm8k#main:train[6961:]"
    """Source of the validation rows."""
    test: str | None = "openai/gsm8k#main:test"
    """Source of the test rows; None: the validation rows."""
    prompt_column: str = "question"
    """Column that holds the question."""
    answer_column: str = "answer"
    """Column that holds the worked solution, which ends with ``#### number``."""
    chat: bool = True
    """Render prompts with the policy's chat template."""
    suffix: str = "\nThink step by step. End with a line of the form: #### number"
    """Text added to every question, such as how to state the answer."""

    def answer(self, row: Row, where: str) -> str:
        number = after_hashes(row[self.answer_column])
        if number is None:
            raise ValueError(
                f"{type(self).__name__}: {where} ends with {row[self.answer_column][-40:]!r}, must "
                "end with '#### number': mend or drop the row"
            )
        return number

    def solution(self, row: Row) -> str:
        return _CALCULATOR.sub("", super().solution(row))


@dataclass(frozen=True)
class Math(TableTask):
    r"""Competition problems in the form of MATH (Hendrycks et al., 2103.03874).

    The answer is what the last ``\boxed{…}`` of the solution holds, in LaTeX. Its authors publish
    a training and a test split; the last 500 training rows are the validation rows here. Tested is
    by default on the 500 test problems of Lightman et al. (2305.20050).
    """

    train: str = "DigitalLearningGmbH/MATH-lighteval:train[:7000]"
    """Source of the training rows."""
    validation: str = "DigitalLearningGmbH/MATH-lighteval:train[7000:]"
    """Source of the validation rows."""
    test: str | None = "HuggingFaceH4/MATH-500:test"
    """Source of the test rows; None: the validation rows."""
    prompt_column: str = "problem"
    """Column that holds the problem."""
    answer_column: str = "solution"
    r"""Column that holds the worked solution, whose last ``\boxed{…}`` is the answer."""
    chat: bool = True
    """Render prompts with the policy's chat template."""
    suffix: str = "\nThink step by step, and put the final answer within \\boxed{}."
    """Text added to every problem, such as how to state the answer."""
    levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Levels of difficulty to take, from 1 to 5, of the column ``level``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.levels or not set(self.levels) <= set(range(1, 6)):
            raise ValueError(
                f"Math.levels is {self.levels}, must name some of 1 to 5: use (1, 2) for easy ones"
            )

    def columns(self) -> tuple[str, ...]:
        return (*super().columns(), "level")

    def keeps(self, row: Row) -> bool:
        # The level is a number or ``Level 3``; a few rows of the original have ``Level ?``.
        found = re.search(r"\d+", str(row["level"]))
        return found is None or int(found[0]) in self.levels

    def answer(self, row: Row, where: str) -> str:
        boxed = last_boxed(row[self.answer_column])
        if boxed is None:
            raise ValueError(
                f"{type(self).__name__}: {where} ends with {row[self.answer_column][-40:]!r}, has "
                "no \\boxed{…} whose braces close: mend or drop the row"
            )
        return boxed

"""Verifiers that compare a final answer with the reference."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Verifier

# Bounded, so that a completion of a million digits costs nothing.
_NUMBER = re.compile(r"-?\d{1,40}(?:,\d{3}){0,12}(?:\.\d{1,40})?")


@dataclass(frozen=True)
class FinalNumber(Verifier):
    """Compares the number that a completion states as its answer.

    With a `marker` (``#``, ``####``, ``answer is``) it is the first number after the last marker,
    and a completion without the marker fails; without one it is the last number of the text.
    """

    marker: str = ""
    """Text that announces the answer; empty: the last number counts."""
    tolerance: float = 0.0
    """Largest absolute difference that still counts as right."""

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ValueError(
                f"FinalNumber.tolerance is {self.tolerance}, must be at least 0: use 0 for exact"
            )

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        expected = _number(problem.answer, last=True)
        if expected is None:
            return Verdict(None, f"the reference answer {problem.answer[:40]!r} has no number")
        text = completion
        if self.marker:
            _, found, text = completion.rpartition(self.marker)
            if not found:
                return Verdict(0.0, f"no {self.marker!r} announces an answer")
        stated = _number(text, last=not self.marker)
        if stated is None:
            return Verdict(0.0, "no number stated")
        right = abs(stated - expected) <= Decimal(str(self.tolerance))
        return Verdict(float(right), f"states {stated}, expected {expected}")


@dataclass(frozen=True)
class ExactMatch(Verifier):
    """Compares the whole completion with the reference answer."""

    ignore_case: bool = False
    """Compare without regard to case."""
    ignore_space: bool = True
    """Compare without regard to the amount of white space."""

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        stated, expected = self._normal(completion), self._normal(problem.answer)
        return Verdict(float(stated == expected), f"states {stated[:40]!r}")

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text


def _number(text: str, last: bool) -> Decimal | None:
    """The first or last number of a text."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1 if last else 0].replace(",", ""))
    except InvalidOperation:
        return None

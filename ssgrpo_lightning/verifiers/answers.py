"""Verifiers that compare a final answer with the reference."""

import re
from dataclasses import dataclass
from decimal import Decimal

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Verifier

# All that hangs together with a number: a part of 1/2, 5^9 or 1e5 is not what was stated.
_STATED = re.compile(r"(?<![\w.^/])(?<![\^/][({])-?(?:\d|\.\d)[\d.,/^]*(?:[eE][+-]?\d+)?", re.ASCII)
# Bounded, so that a completion of a million digits costs nothing.
_NUMBER = re.compile(
    r"-?(?:\d{1,3}(?:,\d{3}){1,12}|\d{1,40})?(?:\.\d{1,40})?(?:[eE][+-]?\d{1,2})?", re.ASCII
)


@dataclass(frozen=True)
class FinalNumber(Verifier):
    """Compares the number that a completion states as its answer.

    With a `marker` (``#``, ``####``, ``answer is``) it is the first number after the last marker,
    and a completion without the marker fails; without one it is the last number of the text. What
    is no plain number (1/2, 5^9) is no answer.

    Behind a marker, every number on the line of the first must be right: ``#40 or 41`` states no
    answer, and a policy would soon learn to hedge. GSM8K's own evaluation, which stops at the first
    number, lets it pass; its solutions have one number there. ``#### 12 (= 12.0)`` is right,
    ``#### 12 in 3 boxes`` is not, lines below do not matter.
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
        expected = _read(*_last(problem.answer))
        if expected is None:
            return Verdict(None, f"the reference answer {problem.answer[:40]!r} has no number")
        stated = _last(completion)
        if self.marker:
            _, found, text = completion.rpartition(self.marker)
            if not found:
                return Verdict(0.0, f"no {self.marker!r} announces an answer")
            stated = _first_line(text)
        first = _read(*stated[:1])
        if first is None:
            return Verdict(0.0, "no number stated")
        tolerance = Decimal(str(self.tolerance))
        numbers = map(_read, stated)
        right = all(n is not None and abs(n - expected) <= tolerance for n in numbers)
        beside = "" if len(stated) == 1 else " and more"
        return Verdict(float(right), f"states {first}{beside}, expected {expected}")


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


def _read(stated: str = "") -> Decimal | None:
    """A number as it was stated; None where it is none that can be read."""
    stated = stated.rstrip(".,")
    if not stated or not _NUMBER.fullmatch(stated):
        return None
    return Decimal(stated.replace(",", ""))


def _last(text: str) -> list[str]:
    """The last number of a text, if it has one."""
    return _STATED.findall(text)[-1:]


def _first_line(text: str) -> list[str]:
    """The numbers on the line of the first, each once."""
    found = _STATED.search(text)
    line = text[found.start() :].partition("\n")[0] if found else ""
    return list(dict.fromkeys(_STATED.findall(line)))

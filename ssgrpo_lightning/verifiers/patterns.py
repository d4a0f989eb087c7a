"""Verifiers of form: a letter among choices, a regular expression."""

import re
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.pool import Pooled
from ssgrpo_lightning.verifiers.verifier import Verifier


@dataclass(frozen=True)
class Choice(Verifier):
    r"""Compares the letter that a completion chooses with the reference letter.

    It is the last one that is announced (``answer: B``, ``option (B)``, ``\boxed{B}``); without
    any, the one that the last line names, if it names a single one.
    """

    letters: str = "ABCDE"
    """The letters to choose from, as written; capitals, or an English "a" would be one."""

    def __post_init__(self) -> None:
        if not self.letters.isalnum() or len(set(self.letters)) != len(self.letters):
            raise ValueError(
                f"Choice.letters is {self.letters!r}, must be letters that differ: use 'ABCD'"
            )

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        expected = self._stated(problem.answer)
        if expected is None:
            return Verdict(None, f"the reference {problem.answer[:40]!r} names none of the letters")
        stated = self._stated(completion)
        if stated is None:
            return Verdict(0.0, "no choice, or more than one")
        return Verdict(float(stated == expected), f"chooses {stated}, expected {expected}")

    def _stated(self, text: str) -> str | None:
        announced = self._announced.findall(text)
        if announced:
            return announced[-1]
        named = set(self._alone.findall(text.strip().rpartition("\n")[2]))
        return named.pop() if len(named) == 1 else None

    @cached_property
    def _announced(self) -> re.Pattern[str]:
        before = r"(?:(?i:answer|choice|option)(?:\s{1,3}is|\s{1,3}would\sbe)?:?|\\boxed)"
        wrap = r"[\s*({$]{0,6}(?:\\(?:text|textbf|mathrm)\{\s?)?\(?"
        return re.compile(rf"{before}{wrap}([{self.letters}])(?![\w'\u2019])")

    @cached_property
    def _alone(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w'\u2019])([{self.letters}])(?![\w'\u2019])")


@dataclass(frozen=True)
class Matches(Pooled):
    """Whether a completion matches a regular expression of Python.

    Where the expression has a group called ``answer``, what it holds in the last match must also
    be the reference answer, white space at its ends aside. It judges in worker processes, because
    an expression may be slow beyond measure on some texts.
    """

    pattern: str
    """The regular expression; ``(?s)`` in front lets a dot match line ends."""
    whole: bool = False
    """It must match the whole completion, not a part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"Matches.pattern is {self.pattern!r}, which is no regular expression ({error}): "
                "mend it"
            ) from error

    def inside(self) -> Verifier:
        return PatternCheck(self.pattern, self.whole)


@dataclass(frozen=True)
class PatternCheck(Verifier):
    """What `Matches` runs in its workers; alone it may hang, so use that."""

    pattern: str
    """As in `Matches`."""
    whole: bool = False
    """As in `Matches`."""

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        pattern = re.compile(self.pattern)
        if self.whole:
            found = pattern.fullmatch(completion)
        elif "answer" in pattern.groupindex:
            last = deque(pattern.finditer(completion), maxlen=1)
            found = last[0] if last else None
        else:
            found = pattern.search(completion)
        if found is None:
            return Verdict(0.0, "does not match")
        if "answer" not in pattern.groupindex:
            return Verdict(1.0, "matches")
        stated = (found["answer"] or "").strip()
        return Verdict(float(stated == problem.answer.strip()), f"states {stated[:40]!r}")

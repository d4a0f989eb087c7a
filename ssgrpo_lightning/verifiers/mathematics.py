r"""Mathematical answers, compared by what they mean: LaTeX and plain, by math-verify."""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from typing import Any, Literal

from ssgrpo_lightning.extraction import after_hashes, last_boxed
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.pool import Pooled
from ssgrpo_lightning.verifiers.verifier import Verifier

Extraction = Literal["any", "boxed", "hashes"]
_PLAIN = re.compile(r"\s*[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?\s*%?\s*")
LONGEST = 1000  # characters of a stated answer


@dataclass(frozen=True)
class MathAnswer(Pooled):
    r"""Compares the stated answer with the reference as expressions, not as text.

    Needs the extra ``math``. It judges in worker processes: what the comparison cannot settle in
    time (``5^(5^(5^5))``) has no verdict.
    """

    extraction: Extraction = "any"
    r"""Where the answer stands: ``any`` as math-verify finds it; ``boxed`` in the last ``\boxed``
    (MATH), ``hashes`` after ``#### `` (GSM8K). With the last two a completion without it fails."""
    tail: int = 4000
    """With ``any``: characters at the end of the completion that are searched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail < 1:
            raise ValueError(f"MathAnswer.tail is {self.tail}, must be at least 1: use 4000")
        if find_spec("math_verify") is None:
            raise ValueError(
                "verifier is MathAnswer, which needs math-verify: "
                "pip install 'ssgrpo-lightning[math]'"
            )

    def inside(self) -> Verifier:
        return MathComparison(self.extraction, self.tail)


@dataclass(frozen=True)
class MathComparison(Verifier):
    """What `MathAnswer` runs in its workers; alone it may hang, so use that."""

    extraction: Extraction = "any"
    """As in `MathAnswer`."""
    tail: int = 4000
    """As in `MathAnswer`."""

    def prepare(self) -> None:
        # It warns, once a completion, of the time limit that it leaves to us.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self("$1$ #### 1", Problem(0, "", "$1$"))

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        expected = read_reference(problem.answer)
        if not expected:
            return Verdict(None, f"the reference answer {problem.answer[:40]!r} cannot be read")
        stated = self._stated(completion)
        if not stated:
            return Verdict(0.0, "no answer that can be read")
        return compare(expected, stated)

    def _stated(self, completion: str) -> list[Any]:
        if self.extraction == "any":
            return _parse(completion[-self.tail :])
        find = last_boxed if self.extraction == "boxed" else after_hashes
        answer = find(completion)
        return [] if answer is None or len(answer) > LONGEST else _parse(as_math(answer))


@lru_cache(maxsize=4096)
def read_reference(answer: str) -> list[Any]:
    """A reference answer, or the solution that ends with it in either convention, as expressions.

    Empty where it cannot be read.
    """
    inner = after_hashes(answer) or last_boxed(answer)
    return _parse(as_math(answer if inner is None else inner))


def as_math(answer: str) -> str:
    r"""A bare answer as text that math-verify reads: LaTeX in dollars, a plain number as it is.

    >>> as_math(r"\frac12"), as_math("1,234"), as_math("$x$")
    ('$\\frac12$', '1,234', '$x$')
    """
    if "$" in answer.replace("\\$", "") or _PLAIN.fullmatch(answer):
        return answer
    return f"${answer}$"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # The pool keeps the time: the library's own limit is a signal.
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]


def compare(expected: list[Any], stated: list[Any]) -> Verdict:
    """Whether any two forms are equal; None where they are not and a comparison failed."""
    from math_verify import verify

    failure = None
    for pair in product(expected, stated):
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return Verdict(1.0, f"states {str(pair[1])[:40]}")
        except MemoryError:
            raise
        except Exception as error:
            failure = error
    if failure is not None:
        return Verdict(None, f"comparison failed: {repr(failure)[:100]}")
    return Verdict(0.0, "states another answer")

"""Segmenters: cut a completion into steps. One abstract class, then its members.

Steps are spans of the *sampled* tokens, never of re-tokenised text, and cover every one of them
exactly once.
"""

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


class Segmenter(ABC):
    """Assigns every sampled token to a step."""

    @abstractmethod
    def __call__(self, pieces: Sequence[str]) -> list[int]:
        """Step index of every token, given the text of every token.

        The first index is 0; from one token to the next it grows by 0 or 1. A piece may be empty
        (an end-of-sequence token) or hold a separator in its middle.
        """


@dataclass(frozen=True)
class ByPattern(Segmenter):
    r"""A step ends after each match of a regular expression.

    A token belongs to the step in which it begins, so that a separator merged into its neighbour
    still gives full cover. White space after the last match belongs to the last step.

    >>> ByPattern(";")(["a", ";", "b;", "c", ""])
    [0, 0, 1, 2, 2]
    """

    pattern: str
    """Regular expression of the separator; it stays with the step it ends."""

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"{type(self).__name__}.pattern is {self.pattern!r}, which is no regular "
                f"expression ({error}): escape its special characters with a backslash"
            ) from error
        if compiled.fullmatch(""):
            raise ValueError(
                f"{type(self).__name__}.pattern is {self.pattern!r}, which matches the empty text "
                "and would cut everywhere: name at least one character"
            )

    def __call__(self, pieces: Sequence[str]) -> list[int]:
        text = "".join(pieces)
        end = len(text.rstrip())
        cuts = [m.end() for m in re.finditer(self.pattern, text) if m.end() < end]
        starts = [0, *accumulate(len(piece) for piece in pieces)][: len(pieces)]
        return _consecutive(bisect_right(cuts, start) for start in starts)


@dataclass(frozen=True)
class ByLine(ByPattern):
    r"""A step is a line; empty lines belong to the step before them.

    >>> ByLine()(["1+1=2", "\n", "\n", "#2", ""])
    [0, 0, 0, 1, 1]
    """

    pattern: str = r"\n+"
    """Regular expression of the separator."""


@dataclass(frozen=True)
class ByTokens(Segmenter):
    """A step is a fixed number of tokens, whatever the text.

    >>> ByTokens(2)(["a", "b", "c"])
    [0, 0, 1]
    """

    size: int = 64
    """Tokens in a step."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"ByTokens.size is {self.size}, must be at least 1: raise it")

    def __call__(self, pieces: Sequence[str]) -> list[int]:
        return [i // self.size for i in range(len(pieces))]


def _consecutive(indices: Iterable[int]) -> list[int]:
    """Renumber growing indices so that they start at 0 and grow by at most 1.

    >>> _consecutive([1, 1, 4, 5])
    [0, 0, 1, 2]
    """
    numbers: dict[int, int] = {}
    return [numbers.setdefault(i, len(numbers)) for i in indices]

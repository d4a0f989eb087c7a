"""Steps are spans of sampled tokens: full cover, no overlap, whatever the tokens look like."""

import pytest

from ssgrpo_lightning.segmenters import ByLine, ByPattern, ByTokens


@pytest.mark.parametrize(
    ("pieces", "steps"),
    [
        (["1+1=2", "\n", "#2", ""], [0, 0, 1, 1]),
        (["1+1=2\n#", "2"], [0, 1]),  # a separator inside a token: it belongs where it begins
        (["a\n\n", "\nb"], [0, 0]),  # …so a run of separators never leaves a token out
        (["a", "\n", "", "\n", "b"], [0, 0, 0, 0, 1]),
        (["\n", "\n", "\n"], [0, 0, 0]),  # only separators: one step
        (["a\nb\nc", "d"], [0, 1]),  # two cuts inside one token still grow by one
        (["a", "\n", "  ", ""], [0, 0, 0, 0]),  # nothing but space after the last separator
        ([], []),
    ],
)
def test_lines(pieces, steps):
    assert ByLine()(pieces) == steps


def test_pattern_and_tokens():
    assert ByPattern(r"\. ")(["One", ". ", "Two", "."]) == [0, 0, 1, 1]
    assert ByTokens(3)(["x"] * 7) == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("pattern", ["(", "a*"])
def test_a_pattern_that_cannot_cut_is_refused(pattern):
    with pytest.raises(ValueError, match=r"ByPattern\.pattern is"):
        ByPattern(pattern)

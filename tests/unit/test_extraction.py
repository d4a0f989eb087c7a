"""Where GSM8K and MATH state their answers."""

import pytest

from ssgrpo_lightning.extraction import after_hashes, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 1,234,567", "1234567"),
        ("#### -3.5 apples", "-3.5"),
        ("#### 10\n#### 11", "10"),  # the first, as the authors' search finds it
        ("#### $12", None),  # their pattern wants the number at once
        ("####12", None),  # and the space
        ("The answer is 10", None),
    ],
)
def test_after_hashes(text, answer):
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 7$ apples", "7"),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace closes nothing
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed7", None),
        (r"$x = 6$", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer

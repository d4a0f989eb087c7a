"""Mathematical answers: as math-verify judges them, and how that differs from the data sets."""

import logging
import random
from fractions import Fraction

import pytest

from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.verifiers import MathAnswer, MathComparison
from ssgrpo_lightning.verifiers.mathematics import as_math

math_verify = pytest.importorskip("math_verify")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def direct(answer, completion):
    """Math-verify called as its authors say; reference and completion as they are."""
    return math_verify.verify(
        math_verify.parse(as_math(answer), parsing_timeout=None),
        math_verify.parse(completion, parsing_timeout=None),
        timeout_seconds=None,
    )


def forms(rng):
    """A reference answer, and the same value in several forms."""
    a, b = rng.randint(2, 4000), rng.randint(2, 60)
    f = Fraction(a, b)
    kind = rng.randrange(8)
    if kind == 0:
        return str(a), [f"{a:,}", f"${a}$", f"{a}.0", rf"\boxed{{{a}}}", f"#### {a}"]
    if kind == 1:
        n, d = f.numerator, f.denominator
        return rf"\frac{{{n}}}{{{d}}}", [f"${n}/{d}$", f"{a}/{b}", rf"$\dfrac{{{a}}}{{{b}}}$"]
    if kind == 2:
        return rf"{b}\sqrt{{{a}}}", [rf"$\sqrt{{{b * b * a}}}$", rf"\boxed{{{b}\sqrt{{{a}}}}}"]
    if kind == 3:
        return f"({a},{b})", [rf"$({a}, {b})$", rf"\boxed{{\left({a},{b}\right)}}", f"${a},{b}$"]
    if kind == 4:
        return f"{b}x+{a}", [f"$ {a} + {b}x $", f"${a} + {b} \\cdot x$", f"$y={b}x+{a}$"]
    if kind == 5:
        return f"{b}%", [f"${b}\\%$", f"{b} percent", f"{b / 100}"]
    if kind == 6:
        return rf"\{{{a},{b}\}}", [rf"$\{{{b},{a}\}}$", rf"$\{{{a}, {b}\}}$"]
    return f"-{b}.5", [f"$-{b}.50$", rf"$-\frac{{{2 * b + 1}}}{{2}}$", f"-{b},5"]


def pairs(count):
    rng, found = random.Random(0), []
    while len(found) < count:
        answer, same = forms(rng)
        wrong = forms(rng)[1]
        found += [(answer, form) for form in [*same, rng.choice(wrong)]]
        found.append(
            (answer, f"First {rng.choice(wrong)}. The final answer is {rng.choice(same)}.")
        )
    return found[:count]


def test_verdicts_agree_with_math_verify_called_directly():
    judged, comparison = pairs(600), MathComparison()
    ours = [comparison(text, Problem(0, "p", answer)).reward for answer, text in judged]
    theirs = [float(direct(*pair)) for pair in judged]
    assert [p for p, a, b in zip(judged, ours, theirs) if a != b] == []
    assert len(set(judged)) >= 500 and 0.2 < sum(theirs) / len(theirs) < 0.95


# Where math-verify's own extraction ("any") and the data sets' conventions disagree: all that was
# found. Completion, reference, verdict of "any", verdict of the convention.
DISAGREEMENTS = [
    # GSM8K: no marker is no answer, the first marker counts, and only what follows it.
    ("hashes", "So 10 apples.", "10", 1, 0),
    ("hashes", "#### -$10", "-10", 0, 0),
    ("hashes", "#### $10", "10", 1, 0),
    ("hashes", "#### 10\nChecked: 12", "10", 0, 1),
    ("hashes", "#### 10\n#### 11", "10", 0, 1),
    ("hashes", "The final answer is 11. #### 10", "10", 0, 1),
    ("hashes", "#### 20/2", "10", 1, 0),  # GSM8K reads 20
    ("hashes", "#### 10%", "10", 1, 1),
    # MATH: no box is no answer, the last box counts alone.
    ("boxed", "The answer is $10$.", "10", 1, 0),
    ("boxed", r"$\boxed{9}$ and $\boxed{10}$", "10", 0, 1),  # math-verify makes {9, 10} of it
    ("boxed", r"The final answer is $9$. I hope so. $\boxed{10}$", "10", 0, 1),
    ("boxed", r"\fbox{10}", "10", 0, 1),
    ("boxed", r"$\boxed{10}", "10", 1, 1),
]


@pytest.mark.parametrize(("convention", "text", "answer", "found", "defined"), DISAGREEMENTS)
def test_where_extraction_disagrees_with_the_convention(convention, text, answer, found, defined):
    problem = Problem(0, "p", answer)
    assert MathComparison("any")(text, problem).reward == found
    assert MathComparison(convention)(text, problem).reward == defined


@pytest.mark.parametrize(
    ("reference", "completion", "reward"),
    [
        ("6*7=42\n#### 42", "#### 42.0", 1),  # a whole solution as the reference
        (r"Thus $\boxed{\frac12}$.", "0.5", 1),
        ("", "5", None),
        ("5", "", 0),
        ("Monday", r"\boxed{\text{Monday}}", 1),
        ("Monday", r"\boxed{\text{Sunday}}", 0),
    ],
)
def test_references_in_either_convention(reference, completion, reward):
    assert MathComparison()(completion, Problem(0, "p", reference)).reward == reward


def test_towers_and_a_million_digits_end_in_time_and_never_as_a_silent_zero():
    judge = MathAnswer(workers=1, seconds=1.0)
    texts = ["5^(5^(5^(5^5)))", r"\boxed{5^{5^{5^{5^5}}}}", "9" * 1_000_000, "7"]
    tower, latex, digits, right = judge.batch(texts, [Problem(0, "p", "7")] * 4)
    assert tower.reward is None and tower.killed and "within 1 s" in tower.reason
    assert latex.reward is None and latex.killed
    assert digits.reward == 0 and right.reward == 1


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match=r"MathAnswer\.tail is 0, must be at least 1"):
        MathAnswer(tail=0)
    with pytest.raises(ValueError, match=r"MathAnswer\.workers is 0, must be at least 1: 2 is"):
        MathAnswer(workers=0)

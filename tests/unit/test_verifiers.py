"""Verdicts: right, wrong, and never a silent zero."""

import time
from dataclasses import replace

import pytest

from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.rollouts import Judge
from ssgrpo_lightning.segmenters import ByLine, Segmenter
from ssgrpo_lightning.verifiers import ExactMatch, FinalNumber, Noisy, Verifier


def verdict(verifier, completion, answer):
    return verifier(completion, Problem(0, "p", answer)).reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so #12", "12", 1.0),
        ("#12\n#13", "12", 0.0),  # the last marker counts
        ("12", "12", 0.0),  # no marker
        ("# none", "12", 0.0),
        ("#40 or 41", "40", 0.0),  # every number on the line must be right
        ("#40 or 41", "41", 0.0),
        ("#12-5", "12", 0.0),
        ("#12 and 1/2", "12", 0.0),
        ("#3:30", "3", 0.0),
        ("#12 (= 12.0)\n7 more", "12", 1.0),  # as is 12, and other lines do not matter
        ("#\n12 apples", "12", 1.0),
        ("# -1,234.50", "-1234.5", 1.0),
        ("#12", "The answer is 12", 1.0),
        ("#12", "twelve", None),  # a reference without a number has no verdict
    ],
)
def test_final_number_after_a_marker(completion, answer, reward):
    assert verdict(FinalNumber("#"), completion, answer) == reward


def test_final_number_without_marker_and_with_tolerance():
    assert verdict(FinalNumber(), "3 apples and 4 make 7.", "7") == 1
    assert verdict(FinalNumber(tolerance=0.01), "3.14", "3.1416") == 1
    assert verdict(FinalNumber(), "3.14", "3.1416") == 0
    assert verdict(FinalNumber("#", 0.01), "#3.14, that is 3.1416", "3.1416") == 1
    assert verdict(FinalNumber(), "40 or 41", "41") == 1  # the last, and nothing announces it


def test_a_million_digits_end_in_time():
    start = time.perf_counter()
    assert verdict(FinalNumber("#"), "#" + "9" * 1_000_000, "9") == 0
    assert verdict(FinalNumber("#"), "#" + "9 " * 1_000_000, "9") == 1
    assert time.perf_counter() - start < 5


def test_exact_match():
    assert verdict(ExactMatch(), " a  b\n", "a b") == 1
    assert verdict(ExactMatch(ignore_case=True), "Yes", "yes") == 1
    assert verdict(ExactMatch(ignore_space=False), "a b ", "a b") == 0


class Broken(Verifier):
    def __call__(self, completion, problem):
        raise RuntimeError("no connection")


class Generous(Verifier):
    def __call__(self, completion, problem):
        return Verdict(7.0)


class Leaky(Segmenter):
    def __call__(self, pieces):
        return [0] * (len(pieces) - 1)


def test_a_verifier_that_fails_gives_no_verdict_and_says_why():
    result = Judge(Broken(), ByLine()).verdict("x", Problem(0, "p", "1"))
    assert result.reward is None and "no connection" in result.reason


def test_a_reward_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"reward 7\.0, must be in \[0, 1\]"):
        Judge(Generous(), ByLine()).verdict("x", Problem(0, "p", "1"))


def test_a_segmenter_that_leaves_a_token_out_is_refused():
    with pytest.raises(ValueError, match="must give every token a step"):
        Judge(ExactMatch(), Leaky()).steps(["a", "b"])


def test_noise_turns_round_a_known_share_and_the_same_verdicts_every_time():
    noisy, exact = Noisy(FinalNumber("#"), flip=0.2, seed=1), FinalNumber("#")
    problems = [Problem(i, "p", str(i % 7)) for i in range(4000)]
    first, clean = ([v("#3", p).reward for p in problems] for v in (noisy, exact))
    turned = [a != b for a, b in zip(first, clean)]
    assert sum(turned) / len(turned) == pytest.approx(0.2, abs=0.02)
    assert all(a == 1 - b for a, b, t in zip(first, clean, turned) if t)
    assert first == [noisy("#3", p).reward for p in problems]
    assert turned != [replace(noisy, seed=2)("#3", p).reward != c for p, c in zip(problems, clean)]
    # Another completion of the same problem has noise of its own.
    assert turned != [noisy("#03", p).reward != c for p, c in zip(problems, clean)]
    assert Noisy(exact, flip=0.0)("#3", problems[3]) == exact("#3", problems[3])


def test_noise_leaves_a_missing_verdict_missing():
    assert Noisy(FinalNumber("#"), flip=0.5)("#1", Problem(0, "p", "none")).reward is None


def test_noise_beyond_a_half_is_refused():
    with pytest.raises(ValueError, match=r"Noisy\.flip is 0\.6, must be from 0 to 0\.5"):
        Noisy(FinalNumber("#"), flip=0.6)

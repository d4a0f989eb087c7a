"""Verdicts: right, wrong, and never a silent zero."""

import time

import pytest

from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.rollouts import Judge
from ssgrpo_lightning.segmenters import ByLine, Segmenter
from ssgrpo_lightning.verifiers import ExactMatch, FinalNumber, Verifier


def verdict(verifier, completion, answer):
    return verifier(completion, Problem(0, "p", answer)).reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so #12", "12", 1.0),
        ("#12\n#13", "12", 0.0),  # the last marker counts
        ("12", "12", 0.0),  # no marker
        ("# none", "12", 0.0),
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


def test_a_million_digits_end_in_time():
    start = time.perf_counter()
    assert verdict(FinalNumber("#"), "#" + "9" * 1_000_000, "9") == 0
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

"""Code by hidden tests: forms of tests, layouts of tables, and verdicts."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.sandbox.inside import decode, encode
from ssgrpo_lightning.sandbox.isolation import BestAvailable
from ssgrpo_lightning.sandbox.suite import CallTest, StreamTest, Suite, agree
from ssgrpo_lightning.tasks import CodeTask
from ssgrpo_lightning.tasks.code import HiddenTests, HumanEval, Mbpp
from ssgrpo_lightning.tasks.table import _path
from ssgrpo_lightning.verifiers import PassesTests
from ssgrpo_lightning.verifiers.code import extract_code

HUMAN_EVAL = {
    "prompt": "from typing import List\n\ndef twice(x):\n    return 2 * x\n\n"
    'def doubled(xs: List[int]) -> List[int]:\n    """Each number twice."""\n',
    "entry_point": "doubled",
    "test": "def check(candidate):\n    for n in range(4):\n"
    "        xs = list(range(n))\n        assert candidate(xs) == [twice(x) for x in xs]\n",
}
MBPP = {
    "text": "Write a function to find the shared elements of two tuples.",
    "test_setup_code": "import math",
    "test_list": [
        "assert set(shared((3, 4, 5), (5, 4, 10))) == {4, 5}",
        "assert math.isclose(sum(shared((1, 2), (2, 3))), 2)",
    ],
}


@pytest.fixture(scope="module")
def verifier():
    refusal = BestAvailable().refusal()
    if refusal is not None:
        pytest.skip(refusal)
    return PassesTests()


def judge(verifier, code, suite):
    return verifier(code, Problem(0, "p", suite.dump()))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_sample_is_solved_by_its_solution_and_not_by_another(verifier, split):
    task = CodeTask()
    problems = task.problems(split)
    rows = [json.loads(line) for line in _path(getattr(task, split)).read_text().splitlines()]
    right = [f"Here it is:\n```python\n{row['solution']}```" for row in rows]
    assert [v.reward for v in verifier.begin(right, problems)()] == [1] * len(rows)
    wrong = [row["solution"] for row in rows[1:] + rows[:1]]
    assert [v.reward for v in verifier.begin(wrong, problems)()] == [0] * len(rows)


def test_the_sample_does_not_leak():
    task = CodeTask()
    train = {p.prompt for p in task.problems("train")}
    assert len(train) == 25 and not train & {p.prompt for p in task.problems("validation")}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("    return [2 * x for x in xs]\n", 1),  # goes on with the prompt
        ("```python\ndef doubled(xs):\n    return [twice(x) for x in xs]\n```", 1),
        ("    return xs", 0),
        # Replacing the helper that the test measures with gains nothing.
        ("    return [0 for x in xs]\n\ndef twice(x):\n    return 0\n", 0),
        ("    raise AssertionError\n", 0),
    ],
)
def test_human_eval(verifier, completion, reward):
    assert judge(verifier, completion, HumanEval().suite(HUMAN_EVAL)).reward == reward


def test_mbpp_by_share(verifier):
    suite = Mbpp().suite(MBPP)
    share = PassesTests(partial=True)
    assert judge(share, "def shared(a, b): return tuple(set(a) & set(b))", suite).reward == 1
    half = judge(share, "def shared(a, b): return (4, 5)", suite)
    assert half.reward == 0.5 and "test 1: AssertionError" in half.reason
    assert judge(verifier, "def shared(a, b): return (4, 5)", suite).reward == 0
    assert MBPP["test_list"][0] in Mbpp().question(MBPP)
    assert MBPP["test_list"][1] not in Mbpp().question(MBPP)


def test_a_program_that_calls_with_what_cannot_be_sent_has_no_verdict(verifier):
    test = {"program": "class A: pass\nassert f(A())", "calls": ["f"]}
    verdict = verifier("def f(x): return x", Problem(0, "p", json.dumps({"tests": [test]})))
    assert verdict.reward is None and "an argument of f: A cannot cross" in verdict.reason


def test_errors_of_the_code_reach_the_test_program(verifier):
    program = (
        "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert 0"
    )
    problem = Problem(0, "p", json.dumps({"tests": [{"program": program, "calls": ["f"]}]}))
    assert verifier("def f(x): raise ValueError('no')", problem).reward == 1
    assert verifier("def f(x): raise KeyError('no')", problem).reward == 0
    assert verifier("def f(x): return 1", problem).reward == 0


def test_a_test_program_that_does_not_end_fails(verifier):
    program = "while f(1):\n    pass"
    problem = Problem(0, "p", json.dumps({"tests": [{"program": program, "calls": ["f"]}]}))
    quick = PassesTests(total_seconds=1.0)
    assert quick("def f(x): return 0", problem).reward == 1
    assert "the time for all tests is over" in quick("def f(x): return 1", problem).reason


def test_streams_and_methods(verifier):
    stream = Suite((StreamTest("3 4\n", "7"), StreamTest("1 1\n" + "x\n" * 50_000, "2")))
    program = "import sys\na, b = map(int, input().split())\nprint(a + b, ' ')\nsys.exit()"
    assert judge(verifier, program, stream).reward == 1
    method = Suite((CallTest("twice", [4], 8),))
    assert (
        judge(verifier, "class Solution:\n    def twice(self, x): return x + x", method).reward == 1
    )


def test_runs_see_nothing_of_each_other(verifier):
    suite = Suite((CallTest("f", [], 1),) * 3)
    assert (
        judge(verifier, "n = 0\ndef f():\n    global n\n    n += 1\n    return n", suite).reward
        == 1
    )


def test_many_verdicts_at_once(verifier):
    def reward(i):
        suite = Suite((CallTest("f", [i], i + 1),))
        return judge(verifier, f"def f(x): return x + {i % 2}", suite).reward

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reward, range(24))) == [i % 2 for i in range(24)]


@pytest.mark.parametrize(
    "answer",
    ["1", "x", "{}", '{"tests": []}', '{"tests": [{}]}', '{"tests": [{"call": 1, "expected": 2}]}'],
)
def test_an_answer_without_tests_has_no_verdict(verifier, answer):
    assert verifier("def f(x): return x", Problem(0, "p", answer)).reward is None


@pytest.mark.parametrize(
    "value",
    [None, True, 2**70, -0.5, "ü\0\ud800", [1, [2]], (1, (2,)), {1, 2}, frozenset("a"), b"\xff", 2j,
     {"a": 1}, {1: (2,)}, {"$set": 1}, {"$x": {"y": [()]}}],
)  # fmt: skip
def test_values_cross_the_border_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (True, 1, True),  # as == has it
        (None, 0, False),
        ("1", 1, False),
        ((1, 2), [1, 2], True),  # JSON has no tuples
        ([1, 2], (1, 2), False),
        ([1], [1, 2], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        (10**400, 1.0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
    ],
)
def test_agreement(value, expected, same):
    assert agree(value, expected) is same


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("a\n```\nx\n```\nb\n```py\ny\n```", "y\n"),
        ("a\n```python\nx = 1", "x = 1"),  # cut off
        ("```x = 1```", "x = 1"),
        ("```py\nx = 1\n```\nUse it:\n```py\nprint(", "x = 1\n"),  # an example cut off
        ("", ""),
    ],
)
def test_extraction(completion, code):
    assert extract_code(completion) == code


def test_a_row_of_another_layout_is_refused_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "tests": "[]"}\n')
    with pytest.raises(ValueError, match=r"row 0 of .* is not of the layout HiddenTests"):
        CodeTask(train=str(path), validation=str(path)).problems("train")
    with pytest.raises(ValueError, match="has no column 'entry_point'"):
        CodeTask(train=str(path), validation=str(path), layout=HumanEval()).problems("train")


def test_tables_of_each_layout(tmp_path):
    tests = [{"stdin": "1", "stdout": "1"}]
    rows = {HiddenTests(): {"prompt": "p", "tests": json.dumps(tests)}}
    for layout, row in {**rows, HumanEval(): HUMAN_EVAL, Mbpp(): MBPP}.items():
        path = tmp_path / f"{type(layout).__name__}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (problem,) = CodeTask(train=str(path), validation=str(path), layout=layout).problems(
            "train"
        )
        assert Suite.read(problem.answer).tests == layout.suite(row).tests

"""Choices, patterns, JSON, functions and reward models."""

import asyncio
import threading
import time

import pytest
import torch

from ssgrpo_lightning.outcome_rewards import OutcomeRewardModel
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.tiny_policy.build import outcome_classifier
from ssgrpo_lightning.verifiers import (
    Choice,
    ExactMatch,
    FinalNumber,
    JsonSchema,
    Matches,
    PatternCheck,
    PythonFunction,
    SchemaCheck,
    Weighted,
)


def reward(verifier, completion, answer="1"):
    return verifier(completion, Problem(0, "p", answer)).reward


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("B", 1),
        ("The answer is (B).", 1),
        ("Answer: **B**", 1),
        (r"so \boxed{\text{B}}", 1),
        ("It is not A.\nSo B.", 1),
        ("The answer is A. No, the answer is B.", 1),
        ("The answer is B. A is wrong", 1),
        ("A or B", 0),
        ("Bananas", 0),
        ("b", 0),
        ("The answer is Bananas", 0),
        ("", 0),
    ],
)
def test_choice(completion, right):
    assert reward(Choice("ABCD"), completion, "B") == right


def test_choice_without_a_letter_in_the_reference_has_no_verdict():
    assert reward(Choice("ABCD"), "B", "Berlin") is None
    with pytest.raises(ValueError, match=r"Choice\.letters is 'AA', must be letters that differ"):
        Choice("AA")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("1/2", "2", 0),
        ("1e5", "5", 0),
        ("5^(5^(5))", "5", 0),
        ("x2", "2", 0),
        ("9" * 41, "9", 0),  # a part of a number is not the number
        ("12-5", "5", 1),
        (".5", "0.5", 1),
        ("7.", "7", 1),
        ("1,234,567", "1234567", 1),
        ("1,23", "123", 0),
        ("1.5e3", "1500", 1),
    ],
)
def test_a_part_of_an_expression_is_no_final_number(text, answer, right):
    assert reward(FinalNumber(), text, answer) == right


def test_matches():
    assert reward(PatternCheck(r"^<think>.*</think>"), "<think>x</think> 1") == 1
    assert reward(PatternCheck("x", whole=True), "xx") == 0
    last = PatternCheck(r"= (?P<answer>\d+)")
    assert reward(last, "= 2, = 1") == 1 and reward(last, "= 1, = 2") == 0
    with pytest.raises(ValueError, match=r"Matches\.pattern is '\(', which is no regular"):
        Matches("(")


def test_a_slow_pattern_is_cut_off():
    verifier = Matches("^(a+)+$", workers=1, seconds=0.5)
    verdict = verifier("a" * 40 + "!", Problem(0, "p", "1"))
    assert verdict.reward is None and verdict.killed


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"n": 1}', 1),
        ('Here:\n```json\n{"n": 1}\n```\nDone.', 1),
        ('{"n": "1"}', 0),
        ("{}", 0),
        ('{"n": 1', 0),
        ("", 0),
    ],
)
def test_json_schema(text, right):
    assert reward(JsonSchema(SCHEMA).inside(), text) == right


def test_json_that_must_equal_the_answer_and_schemas_from_the_problem():
    equal = JsonSchema({}, equals_answer=True).inside()
    assert reward(equal, '{"b": 2, "a": 1.0}', '{"a": 1, "b": 2}') == 1
    assert reward(equal, "true", "1") == 0
    assert reward(SchemaCheck(None), "3", '{"type": "integer"}') == 1
    remote = '{"$ref": "http://127.0.0.1:9/schema"}'
    with pytest.raises(Exception, match="127"):  # never a download
        reward(SchemaCheck(None), "3", remote)
    with pytest.raises(ValueError, match="JsonSchema.schema is no JSON schema"):
        JsonSchema({"type": 3})
    with pytest.raises(ValueError, match="equals_answer is true but JsonSchema.schema is null"):
        JsonSchema(equals_answer=True)


def test_weighted_keeps_every_part():
    verdict = Weighted([FinalNumber(), ExactMatch()], [3.0, 1.0])("so 1", Problem(0, "p", "1"))
    assert verdict.reward == 0.75 and verdict.parts == (1.0, 0.0)
    none = Weighted([FinalNumber(), ExactMatch()], [3.0, 1.0])("x", Problem(0, "p", "x"))
    assert none.reward is None and none.parts == (None, 1.0) and "no number" in none.reason
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match=r"Weighted\.weights"):
            Weighted([FinalNumber(), ExactMatch()], weights)


def scores(completion, problem):
    if completion == "none":
        return None
    if completion == "fail":
        raise RuntimeError("no connection")
    return Verdict(0.5, "half") if completion == "half" else completion == problem.answer


running, most = 0, 0


async def later(completion, problem):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(30 if completion == "slow" else 0.05)
    running -= 1
    return scores(completion, problem)


@pytest.mark.parametrize("name", ["scores", "later"])
def test_python_function(name):
    verifier = PythonFunction(f"{__name__}.{name}")
    texts = ["1", "2", "half", "none", "fail"]
    verdicts = verifier.batch(texts, [Problem(0, "p", "1")] * 5)
    assert [v.reward for v in verdicts] == [1, 0, 0.5, None, None]
    assert "no connection" in verdicts[4].reason and verdicts[2].reason == "half"


def test_an_async_function_is_awaited_together_within_a_loop_and_with_a_time_limit():
    global most
    most = 0
    verifier = PythonFunction(f"{__name__}.later", at_once=4, seconds=1.0)
    problems = [Problem(0, "p", "1")] * 8

    async def inside():
        return verifier.batch(["1"] * 7 + ["slow"], problems)

    verdicts = asyncio.run(inside())
    assert [v.reward for v in verdicts] == [1] * 7 + [None] and verdicts[-1].killed
    assert most == 4
    begun = verifier.begin(["1"] * 8, problems)
    assert threading.active_count() > 1 and len(begun()) == 8


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"function is 'math\.nothing', which cannot be imported"):
        PythonFunction("math.nothing")
    with pytest.raises(ValueError, match=r"'math\.pi', which is a float, must be a function"):
        PythonFunction("math.pi")


@pytest.mark.parametrize("labels", [1, 3])
def test_outcome_rewards_do_not_depend_on_the_batch(tmp_path, labels):
    outcome_classifier(tmp_path, labels)
    texts = ["1+2=3", "#", "<eos>", "1+2+3=6;6+1=7", "<eos><eos>"]
    problems = [Problem(0, "1+2=", "3")] * 5
    model = OutcomeRewardModel(str(tmp_path), label=labels - 1, device="cpu")
    together = [v.reward for v in model.batch(texts, problems)]
    alone = [model(text, problems[0]).reward for text in texts]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(r, 4) for r in together}) >= 3 and all(0 < r < 1 for r in together)
    ids = torch.tensor([model._tokenizer("1+2=1+2=3")["input_ids"]])
    logits = model._model(input_ids=ids).logits[0]
    expected = logits.sigmoid()[0] if labels == 1 else logits.softmax(-1)[labels - 1]
    assert alone[0] == pytest.approx(float(expected), abs=1e-5)


def test_outcome_rewards_of_long_and_missing_models(tmp_path):
    outcome_classifier(tmp_path)
    short = OutcomeRewardModel(str(tmp_path), max_tokens=8)
    start = time.perf_counter()
    assert short("1" * 1_000_000, Problem(0, "p", "1")).reward is None
    assert time.perf_counter() - start < 10
    with pytest.raises(ValueError, match=r"OutcomeRewardModel\.name is './nowhere'"):
        OutcomeRewardModel("./nowhere")
    with pytest.raises(ValueError, match="label is 4, must be in"):
        outcome_classifier(tmp_path, 3)
        OutcomeRewardModel(str(tmp_path), label=4)("1", Problem(0, "p", "1"))

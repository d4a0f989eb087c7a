"""Calls of tools: name, arguments and their types, nothing missing and nothing more."""

import json

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import ToolCalls
from ssgrpo_lightning.verifiers import ToolCall
from ssgrpo_lightning.verifiers.tool_calls import same_json

PARAMETERS = {
    "type": "object",
    "properties": {
        "town": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
    },
    "required": ["town"],
}
TOOLS = [{"name": "weather", "parameters": PARAMETERS}, {"name": "time", "parameters": {}}]
EXPECTED = {"name": "weather", "arguments": {"town": "Oslo", "days": 3, "wind": True}}
PROBLEM = Problem(0, "p", json.dumps([EXPECTED]), {"tools": TOOLS})


def call(**arguments):
    return tagged({"name": "weather", "arguments": {**EXPECTED["arguments"], **arguments}})


def tagged(value):
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


@pytest.mark.parametrize(
    ("completion", "reward", "partial"),
    [
        ("I look it up. " + call(), 1, 1),
        (call(days=3.0), 1, 1),  # JSON knows one kind of number
        (call(days="3"), 0, 0.5),
        (call(days=True), 0, 0.5),
        (call(wind=1), 0, 0.5),
        (call(days=4), 0, 0.75),  # the schema allows it
        (call(town="oslo"), 0, 0.75),
        (call(hour=9), 0, 0.5),  # an argument too many
        (tagged({"name": "weather", "arguments": {"town": "Oslo"}}), 0, 0.75),  # one too few
        (tagged({"name": "weather", "arguments": {"days": 3}}), 0, 0.5),  # without the required
        (tagged({"name": "time", "arguments": EXPECTED["arguments"]}), 0, 0.25),
        (call() + call(), 0, 0.25),
        (tagged(EXPECTED | {"id": 1}), 0, 0),
        (tagged([EXPECTED]), 0, 0),
        (json.dumps(EXPECTED), 0, 0),
        (call() + "<tool_call>", 0, 0),  # a call that was cut off
        (call().replace('"days": 3', '"days": 4, "days": 3'), 0, 0),
        (call().replace("3", "NaN"), 0, 0),
        (call().replace("3", "9" * 5000), 0, 0),
        ("<tool_call>" + "[" * 15_000 + "</tool_call>", 0, 0),
        ("<tool_call>" * 1500, 0, 0),
        ("x" * 1_000_000 + call(), 0, 0),
        ("", 0, 0),
        ("\x00", 0, 0),
    ],
)
def test_calls(completion, reward, partial):
    assert ToolCall()(completion, PROBLEM).reward == reward
    assert ToolCall(partial=True)(completion, PROBLEM).reward == partial


def test_several_calls_count_in_order():
    other = {"name": "time", "arguments": {}}
    problem = Problem(0, "p", json.dumps([EXPECTED, other]), {"tools": TOOLS})
    assert ToolCall()(tagged(EXPECTED) + tagged(other), problem).reward == 1
    assert ToolCall()(tagged(other) + tagged(EXPECTED), problem).reward == 0
    assert ToolCall("", "")(json.dumps([EXPECTED, other]), problem).reward == 1
    assert ToolCall("", "")(json.dumps(EXPECTED), PROBLEM).reward == 1


def test_reasons_name_what_is_wrong():
    judge = ToolCall(partial=True)
    assert "knows no argument hour" in judge(call(hour=9), PROBLEM).reason
    assert "'3' is not of type 'integer'" in judge(call(days="3"), PROBLEM).reason
    assert ToolCall()(call(), Problem(0, "p", "Oslo")).reward is None
    with pytest.raises(ValueError, match="must have both or neither"):
        ToolCall(opening="")


def test_equal_values_are_of_the_same_type():
    assert same_json({"a": [1, None]}, {"a": [1.0, None]})
    assert not same_json([1, 2], [2, 1])
    assert not same_json(None, False)
    assert not same_json(0, False)
    assert not same_json({}, [])


def test_the_sample_is_solved_by_its_references_and_by_nothing_near():
    task, judge = ToolCalls(), ToolCall(partial=True)
    problems = task.problems("train") + task.problems("validation")
    assert len(problems) == 40
    for problem in problems:
        calls = json.loads(problem.answer)
        assert judge("".join(map(tagged, calls)), problem).reward == 1
        for wrong in calls:
            name = next(iter(wrong["arguments"]))
            wrong["arguments"][name] = None
        # No tool of the sample takes null for its first argument.
        assert judge("".join(map(tagged, calls)), problem).reward == 0.5

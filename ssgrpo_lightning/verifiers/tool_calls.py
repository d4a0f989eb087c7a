"""A verifier of tool calls: name and arguments, against a schema and the expected calls."""

import json
import re
from dataclasses import dataclass
from typing import Any

from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Verifier


@dataclass(frozen=True)
class ToolCall(Verifier):
    """Compares the calls of a completion with those expected, for problems of `ToolCalls`.

    A call is a JSON object with exactly a name and arguments. It is right if the name is the
    expected one and the arguments are too: same keys, none more and none less, same values of the
    same JSON type (1 is 1.0, but neither "1" nor true). Calls count in order, and one too many is
    wrong. Needs the extra ``json`` where `partial` is true.
    """

    opening: str = "<tool_call>"
    """Text before a call; empty: the whole completion is one JSON call, or a list of them."""
    closing: str = "</tool_call>"
    """Text after a call."""
    partial: bool = False
    """Give what is nearly right a part of the reward: a quarter each for calls that can be read,
    that are as many and of the names expected, and whose arguments keep to the tool's schema."""
    longest: int = 20_000
    """Characters of a completion; a longer one is wrong."""

    def __post_init__(self) -> None:
        if bool(self.opening) != bool(self.closing):
            raise ValueError(
                f"ToolCall has opening {self.opening!r} and closing {self.closing!r}, must have "
                "both or neither: set both to '' for completions that are bare JSON"
            )

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        expected = _loaded(problem.answer)
        expected = [expected] if isinstance(expected, dict) else expected
        if not isinstance(expected, list) or not all(map(_is_call, expected)):
            return Verdict(None, f"the reference {problem.answer[:40]!r} is no list of calls")
        if len(completion) > self.longest:
            return Verdict(0.0, f"the completion has {len(completion)} characters")
        calls = self._calls(completion)
        if calls is None:
            return Verdict(0.0, "no JSON with a name and arguments")
        if same_json(calls, expected):
            return Verdict(1.0, "as expected")
        steps, reason = 1, "another number of calls, or other names"
        if [c["name"] for c in calls] == [c["name"] for c in expected]:
            steps, reason = 2, "other arguments"
            if self.partial and (wrong := _against_schemas(calls, problem)) is not None:
                reason = wrong
            else:
                steps = 3
        return Verdict(steps / 4 if self.partial else 0.0, reason)

    def _calls(self, completion: str) -> list[dict[str, Any]] | None:
        """The calls of a completion; None where one cannot be read or there is none."""
        if not self.opening:
            found = _loaded(completion)
            calls = found if isinstance(found, list) else [found]
        else:
            pattern = re.escape(self.opening) + "(.*?)" + re.escape(self.closing)
            calls = [_loaded(text) for text in re.findall(pattern, completion, re.DOTALL)]
            if completion.count(self.opening) != len(calls):
                return None
        return calls if calls and all(map(_is_call, calls)) else None


def same_json(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal, types included.

    >>> same_json({"a": [1, 2.0]}, {"a": [1.0, 2]})
    True
    >>> same_json(1, True), same_json(1, "1"), same_json({"a": 1}, {"a": 1, "b": None})
    (False, False, False)
    """
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return (numbers or type(left) is type(right)) and left == right


def _against_schemas(calls: list[dict[str, Any]], problem: Problem) -> str | None:
    """What the schema of a call's tool finds wrong with its arguments, if anything."""
    try:
        import jsonschema
    except ImportError as error:
        raise ValueError(
            "ToolCall.partial needs the package jsonschema: pip install 'ssgrpo-lightning[json]', "
            "or set partial to false"
        ) from error
    schemas = {tool["name"]: tool["parameters"] for tool in problem.metadata["tools"]}
    for call in calls:
        # An argument that the schema does not name is refused, whatever the schema says of others.
        extra = call["arguments"].keys() - schemas[call["name"]].get("properties", {}).keys()
        if extra:
            return f"{call['name']} knows no argument {', '.join(sorted(extra))}"[:200]
        try:
            jsonschema.validate(call["arguments"], schemas[call["name"]])
        except jsonschema.ValidationError as error:
            return f"{call['name']}: {error.message}"[:200]
    return None


def _is_call(value: Any) -> bool:
    """Whether a JSON value has the form of a call."""
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "arguments"}
        and isinstance(value["name"], str)
        and isinstance(value["arguments"], dict)
    )


def _loaded(text: str) -> Any:
    """A JSON value; None for text that is none, repeats a key or writes no finite number."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands there twice")
        return dict(pairs)

    def finite(text: str) -> float:
        raise ValueError(f"{text} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=finite)
    except (ValueError, RecursionError):
        return None

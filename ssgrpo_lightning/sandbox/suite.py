"""Hidden tests: their forms, how they are written as a reference answer, and how they are run.

What a test expects never enters the sandbox with the code: inputs go in, what the code returned or
printed comes out, and the comparison happens outside.
"""

import ast
import builtins
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ssgrpo_lightning.sandbox.inside import decode
from ssgrpo_lightning.sandbox.isolation import Isolation
from ssgrpo_lightning.sandbox.session import Limits, SandboxError, Session


@dataclass
class Room:
    """The sandboxes of one completion: one holds its code, a second its test programs, if any."""

    isolation: Isolation
    """What keeps both in."""
    limits: Limits
    """What each may use."""
    code: str
    """The code under test."""
    deadline: float = math.inf
    """When all tests must have ended, on the monotonic clock."""
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)
    _sessions: dict[str, Session] = field(default_factory=dict, repr=False)

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the code on one request; how it ended, and what it wrote."""
        return self._session("serve").ask(request)

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the code; the JSON data of its ``value``, or its ``error``."""
        reply = self.run(request)
        if reply["end"] != "exit" or reply["code"] != 0:
            return {"error": "RuntimeError", "message": ending(reply)}
        try:
            told = json.loads(reply["out"])
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or not {"value", "error"} & set(told):
            return {"error": "RuntimeError", "message": "ended before the function returned"}
        return told

    @property
    def tester(self) -> Session:
        """The sandbox of the test programs."""
        return self._session("check")

    def _session(self, mode: Any) -> Session:
        if mode not in self._sessions:
            code = self.code if mode == "serve" else ""
            opened = self.isolation.open(self.limits, mode, code)
            self._sessions[mode] = self._stack.enter_context(opened)
        return self._sessions[mode]


class HiddenTest(ABC):
    """One test of a completion's code."""

    @abstractmethod
    def failure(self, room: Room) -> str | None:
        """Why the code fails it, in a few words; None where it passes.

        Raises:
            SandboxError: The sandbox failed, or the test cannot be carried out.
        """


@dataclass(frozen=True)
class CallTest(HiddenTest):
    """A call of a function, and the value that it must return."""

    call: str
    """Name of the function, or of a method of a class ``Solution``."""
    args: list[Any]
    """Arguments as JSON data (`inside.encode`)."""
    expected: Any
    """The value, as JSON data."""

    def failure(self, room: Room) -> str | None:
        told = room.call({"call": self.call, "args": self.args})
        if "value" not in told:
            return f"{told['error']}: {told.get('message', '')}"[:200]
        # Sets of chosen integers take quadratic time to build, so nothing far longer is looked at.
        if len(json.dumps(told["value"])) > 16 * len(json.dumps(self.expected)) + 4096:
            return "returned a far longer value"
        try:
            same = agree(decode(told["value"]), decode(self.expected))
        except (TypeError, ValueError, ArithmeticError, RecursionError):
            return "returned something malformed"
        return None if same else "returned another value"


@dataclass(frozen=True)
class StreamTest(HiddenTest):
    """A program's standard input, and what it must print; space at the end of lines is ignored."""

    stdin: str
    """What it reads."""
    stdout: str
    """What it must print."""

    def failure(self, room: Room) -> str | None:
        reply = room.run({"stdin": self.stdin})
        if reply["end"] != "exit" or reply["code"] != 0:
            return ending(reply)
        return None if _lines(reply["out"]) == _lines(self.stdout) else "printed something else"


@dataclass(frozen=True)
class ProgramTest(HiddenTest):
    """A program with assertions, which runs in a sandbox of its own.

    The functions under test are stand-ins there, which send their arguments over.
    """

    program: str
    """Python source; the test is passed where it runs to its end."""
    calls: list[str]
    """Names of the functions under test."""
    target: str = ""
    """Function that all names stand for; empty: each stands for itself."""

    def failure(self, room: Room) -> str | None:
        tester = room.tester
        tester.send({"program": self.program, "calls": self.calls})
        while True:
            if time.monotonic() > room.deadline:
                raise OutOfTime
            try:
                message = tester.receive(room.limits.wall_seconds)
            except SandboxError as error:
                raise OutOfTime(f"the test did not end: {error}") from error
            if "call" in message:
                tester.send(room.call(message | {"call": self.target or message["call"]}))
            elif "unfit" in message:
                raise SandboxError(f"the test does not fit it: {message['unfit']}")
            else:
                return None if message.get("passed") is True else str(message.get("reason"))


class OutOfTime(Exception):
    """No test after this one can be run."""


_FORMS: dict[str, tuple[type[HiddenTest], Mapping[str, type]]] = {
    "expected": (CallTest, {"call": str, "args": list, "expected": object}),
    "stdout": (StreamTest, {"stdin": str, "stdout": str}),
    "program": (ProgramTest, {"program": str, "calls": list}),
}


@dataclass(frozen=True)
class Suite:
    """The hidden tests of a problem."""

    tests: tuple[HiddenTest, ...]
    """The tests, in the order in which they are run."""
    prefix: str = ""
    """Source that stands before the completion's code, such as the imports of the prompt."""

    def dump(self) -> str:
        """The suite as JSON, for `Problem.answer`."""
        tests = [vars(test) for test in self.tests]
        return json.dumps({"tests": tests, "prefix": self.prefix})

    @classmethod
    def read(cls, text: str) -> "Suite":
        """The suite that `dump` wrote.

        >>> Suite.read('{"tests": [{"stdin": "1", "stdout": "2"}]}').tests
        (StreamTest(stdin='1', stdout='2'),)

        Raises:
            ValueError: The text is something else.
        """
        try:
            data = json.loads(text)
            tests = tuple(map(_read_test, data["tests"]))
            prefix = data.get("prefix", "")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{text[:60]!r} holds no hidden tests ({error}): give JSON such as "
                '{"tests": [{"call": "f", "args": [1], "expected": 2}]}'
            ) from error
        if not tests:
            raise ValueError(f"{text[:60]!r} holds an empty list of tests: give at least one")
        return cls(tests, prefix)

    def failures(self, room: Room) -> Iterator[str | None]:
        """Of each test in turn, why it failed; None where it passed.

        Raises:
            SandboxError: The sandbox failed, or a test cannot be carried out.
        """
        late = ""
        for test in self.tests:
            if not late and time.monotonic() > room.deadline:
                late = "the time for all tests is over"
            try:
                yield late or test.failure(room)
            except OutOfTime as error:
                late = str(error) or "the time for all tests is over"
                yield late


def _read_test(data: Any) -> HiddenTest:
    for key, (form, fields) in _FORMS.items():
        if key in data:
            for name, kind in fields.items():
                if not isinstance(data[name], kind):
                    raise TypeError(f"{name} is {data[name]!r}, must be {kind.__name__}")
            return form(**data)
    raise ValueError(f"a test has none of {', '.join(_FORMS)}")


def free_names(program: str) -> list[str]:
    r"""Names that a test program uses and neither binds, imports nor finds built in.

    >>> free_names("import math\nassert math.sqrt(f(2)) == sorted(g(1))")
    ['f', 'g']

    Raises:
        ValueError: It is no Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"the test {program[:60]!r} is no Python ({error}): mend it") from error
    own, used = set(dir(builtins)), set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
    return sorted(used - own)


def agree(value: Any, expected: Any) -> bool:
    """Whether a value is the expected one: ``==``, but for the last digits of floats.

    JSON knows no tuples, so an expected list may also be one.

    >>> agree((0.1 + 0.2, [1]), [0.3, [1]]), agree("3", 3)
    (True, False)
    """
    if isinstance(expected, list | tuple):
        kinds: tuple[type, ...] = (list, tuple) if isinstance(expected, list) else (tuple,)
        long = isinstance(value, kinds) and len(value) == len(expected)
        return long and all(map(agree, value, expected))
    if isinstance(expected, dict):
        same = isinstance(value, dict) and value.keys() == expected.keys()
        return same and all(agree(value[k], expected[k]) for k in expected)
    numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    if numbers and (isinstance(value, float) or isinstance(expected, float)):
        both_nan = value != value and expected != expected
        return both_nan or _close(value, expected)
    return (type(value) is type(expected) and value == expected) or (numbers and value == expected)


def _close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:  # an integer beyond the floats
        return False


def ending(reply: Mapping[str, Any]) -> str:
    """How a run ended, for people."""
    endings: dict[str, Callable[[], str]] = {
        "time": lambda: "took too long",
        "output": lambda: "wrote too much",
        "exit": lambda: f"ended with {reply['code']}",
    }
    return endings[reply["end"]]()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

"""The verifiers of reasoning-gym's tasks, on answers that cannot run as code."""

import ast
import inspect
import json
import re
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Verifier

_FUNCTIONS = re.compile("a?(sin|cos|tan)|(sin|cos|tan)h|sec|csc|cot|exp|log|ln|sqrt|Abs")
_LITERAL = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_SIGNS = (ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub)
_PRODUCTS = (ast.Mult, ast.Div, ast.Pow, ast.Call)
# Largest product of exponents on a way from the root of a formula to a leaf, and digits of a
# number: beyond them a short formula can keep a computer algebra system busy for ever.
_POWERS, _DIGITS = 32, 15


@dataclass(frozen=True)
class ReasoningGymScore(Verifier):
    """The score that a task of reasoning-gym gives an answer, for problems of `ReasoningGym`.

    The answer is what stands in the last pair of tags. Some scorers of the library hand it to
    Python's ``eval`` or to a parser that evaluates: these see it only if it is the reference, a
    literal, or a formula of numbers, names and elementary functions with bounded powers. A problem
    whose scorer takes nonsense too has no verdict.
    """

    opening: str = "<answer>"
    """Text before the answer; empty: the whole completion is the answer."""
    closing: str = "</answer>"
    """Text after the answer; a completion that the budget cut off before it has no answer."""
    threshold: float | None = 1.0
    """Score from which an answer is right (reward 1, else 0); None: partial scores are kept, which
    many tasks give to any text that holds the right answer."""
    longest: int = 4096
    """Characters of an answer; a longer one is wrong."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(
                f"ReasoningGymScore.threshold is {self.threshold}, must be above 0 and at most 1: "
                "use 1 for fully right answers, null to keep partial scores"
            )

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        if "entry" not in problem.metadata:
            return Verdict(None, "no problem of the task ReasoningGym")
        answer = self._stated(completion)
        if answer is None:
            return Verdict(0.0, f"no answer between {self.opening!r} and {self.closing!r}")
        if len(answer) > self.longest:
            return Verdict(0.0, f"the answer has {len(answer)} characters")
        name, config = problem.metadata["gym"], problem.metadata["config"]
        scorer, evaluates = _scorer(name, json.dumps(config, sort_keys=True))
        if evaluates and answer != problem.answer and not harmless(answer, evaluates):
            return Verdict(0.0, f"{name} would evaluate {answer[:40]!r}, which is no {evaluates}")
        try:
            score = float(scorer.score_answer(answer, problem.metadata["entry"]))
        except Exception as error:
            return Verdict(None, f"the scorer of {name} failed: {error!r}"[:200])
        if score >= 1 and _takes_nonsense(scorer, problem):
            return Verdict(None, f"the scorer of {name} takes any answer to this problem")
        if self.threshold is not None:
            score = float(score >= self.threshold)
        return Verdict(min(max(score, 0.0), 1.0), f"{name} scores {answer[:40]!r}")

    def prepare(self) -> None:
        _library()  # takes seconds, which would count as those of the first verdict

    def _stated(self, completion: str) -> str | None:
        text = completion
        if self.closing:
            text, found, _ = completion.rpartition(self.closing)
            if not found:
                return None
        if self.opening:
            _, found, text = text.rpartition(self.opening)
            if not found:
                return None
        return text.strip()


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            "the verifier ReasoningGymScore needs the package reasoning-gym: "
            "pip install 'ssgrpo-lightning[gym]'"
        ) from error
    return reasoning_gym


@lru_cache(maxsize=64)
def _scorer(name: str, config: str) -> tuple[Any, Literal["literal", "formula"] | None]:
    """The dataset that scores, and what an answer may be where its module evaluates answers."""
    scorer = _library().create_dataset(name, seed=0, size=1, **json.loads(config))
    module = sys.modules[type(scorer).__module__]
    source = inspect.getsource(module)
    # Read off the source, so that a task of a later version of the library is guarded too.
    if re.search(r"\b(parse_expr|sympify)\(", source) and "sympy" in source:
        return scorer, "formula"
    return scorer, "literal" if re.search(r"\beval\(", source) else None


def _takes_nonsense(scorer: Any, problem: Problem) -> bool:
    """Whether a scorer gives its full score to what is no task's answer: one of them does."""
    try:
        return scorer.score_answer("\x00", problem.metadata["entry"]) >= 1
    except Exception:  # what it cannot read, it does not take
        return False


def harmless(text: str, kind: Literal["literal", "formula"]) -> bool:
    """Whether evaluating a text can do nothing but give a value, in little time.

    Args:
        text: What would be evaluated.
        kind: A literal may hold strings, numbers and containers, but no names: a scorer's own
            variables hold the reference answer. A formula may hold numbers, names of one letter,
            elementary functions and powers. Text that is no Python is a harmless literal, because
            evaluating it fails, but no formula: their parser rewrites text first.

    >>> harmless("[1, 'a']", "literal"), harmless("exit()", "literal"), harmless("1 2", "literal")
    (True, False, True)
    >>> harmless("x**2/2 + sin(x)", "formula"), harmless("9**9**9", "formula")
    (True, False)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
        if kind == "literal":
            return all(isinstance(n, (*_LITERAL, *_SIGNS)) for n in ast.walk(tree))
        # A list times a number is a bomb, so lists may stand around formulas but not inside.
        items = tree.elts if isinstance(tree, (ast.Tuple, ast.List)) else [tree]
        return all(_bounded(item, _POWERS, 2) for item in items)
    except SyntaxError:
        return kind == "literal"
    except (ValueError, MemoryError, RecursionError):
        return False


def _bounded(node: ast.AST, powers: float, calls: int) -> bool:
    """Whether a formula keeps to its grammar and to what is left of powers and nested calls."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and abs(node.value) < 10**_DIGITS
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id == "pi"
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and bool(_FUNCTIONS.fullmatch(node.func.id))
        plain = len(node.args) == 1 and not node.keywords and calls > 0
        return named and plain and _bounded(node.args[0], powers, calls - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = _number(node.right)
        if exponent is None:  # E**x, which stays as it is written
            return isinstance(node.left, ast.Name) and _bounded(node.right, 1, 0)
        left = powers / max(abs(exponent), 1)
        return abs(exponent) <= powers and _bounded(node.left, left, calls)
    allowed = isinstance(node, (ast.UnaryOp, ast.BinOp))
    if not allowed or not isinstance(node.op, (*_SIGNS, *_PRODUCTS)):
        return False
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return all(_bounded(part, powers, calls) for part in parts)


def _number(node: ast.AST) -> float | None:
    """Value of a number, a negative one or a fraction of two."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        above, below = _number(node.left), _number(node.right)
        return None if above is None or not below else above / below
    return None

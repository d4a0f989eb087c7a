"""JSON that must fit a schema."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.pool import Pooled
from ssgrpo_lightning.verifiers.verifier import Verifier

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", re.DOTALL)


@dataclass(frozen=True)
class JsonSchema(Pooled):
    """Whether a completion is JSON that fits a schema.

    The JSON is the whole completion, or the last fenced block where there is one. Needs the extra
    ``json``. It judges in worker processes, because a schema may hold slow patterns.
    """

    schema: dict[str, Any] | None = None
    """The schema; null: the reference answer of each problem is one."""
    equals_answer: bool = False
    """The value must also equal the reference answer, read as JSON. Not without `schema`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("jsonschema") is None:
            raise ValueError(
                "verifier is JsonSchema, which needs jsonschema: "
                "pip install 'ssgrpo-lightning[json]'"
            )
        if self.schema is None and self.equals_answer:
            raise ValueError(
                "JsonSchema.equals_answer is true but JsonSchema.schema is null, so that the "
                "answer is the schema: give a schema ({} fits anything)"
            )
        if self.schema is not None:
            try:
                _validator(json.dumps(self.schema))
            except Exception as error:
                raise ValueError(
                    f"JsonSchema.schema is no JSON schema ({str(error).splitlines()[0]}): mend it"
                ) from error

    def inside(self) -> Verifier:
        schema = None if self.schema is None else json.dumps(self.schema)
        return SchemaCheck(schema, self.equals_answer)


@dataclass(frozen=True)
class SchemaCheck(Verifier):
    """What `JsonSchema` runs in its workers."""

    schema: str | None
    """The schema as JSON; None: the reference answer."""
    equals_answer: bool = False
    """As in `JsonSchema`."""

    def prepare(self) -> None:
        _validator(self.schema or "{}")

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        validator = _validator(problem.answer if self.schema is None else self.schema)
        fenced = _FENCED.findall(completion)
        try:
            value = json.loads(fenced[-1] if fenced else completion)
        except json.JSONDecodeError as error:
            return Verdict(0.0, f"no JSON: {str(error)[:80]}")
        for error in validator.iter_errors(value):
            place = "/".join(map(str, error.absolute_path))[:40]
            return Verdict(0.0, f"does not fit at /{place}: {error.message[:80]}")
        if self.equals_answer and not same(value, json.loads(problem.answer)):
            return Verdict(0.0, "fits, but is not the reference answer")
        return Verdict(1.0, "fits")


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values, in which true is not 1.

    >>> same({"a": [1, 2.0]}, {"a": [1.0, 2]}), same(True, 1), same([1], [1, 2])
    (True, False, False)
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    from jsonschema import validators
    from referencing import Registry

    parsed = json.loads(schema)
    kind = validators.validator_for(parsed, default=validators.Draft202012Validator)
    kind.check_schema(parsed)
    # An empty registry: a reference to another schema is an error, never a download.
    return kind(parsed, registry=Registry())

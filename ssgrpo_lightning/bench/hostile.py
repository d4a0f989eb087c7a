"""Hostile completions through every verifier: `python -m ssgrpo_lightning.bench.hostile`.

Prints, for each verifier, how many were judged, refused, without a verdict, accepted and graded,
and the longest time that one took. Ends with the number accepted, which must be 0. Nothing may
raise. A reward model grades whatever it reads, and knows no wrong answer.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.outcome_rewards import OutcomeRewardModel
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.sandbox.session import Limits
from ssgrpo_lightning.tasks import ReasoningGym
from ssgrpo_lightning.tiny_policy.build import outcome_classifier
from ssgrpo_lightning.verifiers import (
    Choice,
    ExactMatch,
    FinalNumber,
    Isolated,
    JsonSchema,
    Matches,
    MathAnswer,
    Noisy,
    PassesTests,
    PythonFunction,
    ReasoningGymScore,
    ToolCall,
    Verifier,
    Weighted,
)
from ssgrpo_lightning.verifiers.hostile import hostile_completions


@dataclass(frozen=True)
class Case:
    """A verifier and a problem whose answer no hostile completion states."""

    verifier: Verifier
    problem: Problem = Problem(0, "", "72")
    grades: bool = False
    """Whether any reward will do."""


def cases(seconds: float, models: Path) -> dict[str, Case]:
    """Every verifier.

    Args:
        seconds: Time limit where there is one.
        models: Folder for the reward model that is read, untrained.
    """
    outcome_classifier(models)
    call = {"name": "add", "arguments": {"left": 72}}
    tests = {"tests": [{"call": "f", "args": [], "expected": 72}]}
    # Its scorer evaluates answers.
    gym = ReasoningGym("simple_integration", train_problems=1, held_out_problems=1)
    limits = Limits(cpu_seconds=1, wall_seconds=max(seconds, 1.0))
    unique = {"type": "array", "uniqueItems": True, "minItems": 1, "items": {"type": "string"}}
    slow = {"type": "string", "pattern": "^(a+)+$"}
    functions = "ssgrpo_lightning.bench.hostile."
    hashes = MathAnswer("hashes", seconds=seconds)
    return {
        "FinalNumber": Case(FinalNumber()),
        "FinalNumber after ####": Case(FinalNumber("####")),
        "ExactMatch": Case(ExactMatch()),
        "Choice": Case(Choice("ABCDE"), Problem(0, "", "B")),
        "Matches, a slow pattern": Case(Matches(r"^(a+)+$", seconds=seconds)),
        "Matches, an answer": Case(Matches(r"(?P<answer>\d+)\s*$", seconds=seconds)),
        "JsonSchema, unique items": Case(JsonSchema(unique, seconds=seconds)),
        "JsonSchema, a slow pattern": Case(JsonSchema(slow, seconds=seconds)),
        "MathAnswer": Case(MathAnswer(seconds=seconds)),
        "MathAnswer in \\boxed": Case(MathAnswer("boxed", seconds=seconds)),
        "MathAnswer after ####": Case(hashes),
        "Weighted": Case(Weighted([FinalNumber(), hashes], [1, 1])),
        "Noisy": Case(Noisy(FinalNumber(), flip=0.0)),
        "PythonFunction": Case(PythonFunction(functions + "equal")),
        "PythonFunction, async": Case(PythonFunction(functions + "equal_later")),
        "ReasoningGymScore": Case(ReasoningGymScore("", ""), gym.problems("train")[0]),
        "ToolCall": Case(ToolCall("", ""), Problem(0, "", json.dumps(call))),
        "PassesTests": Case(PassesTests(limits=limits), Problem(0, "", json.dumps(tests))),
        "OutcomeRewardModel": Case(
            OutcomeRewardModel(str(models.resolve())), Problem(0, "1+2=", "3"), grades=True
        ),
        "Isolated, evaluates": Case(
            Isolated(PythonFunction(functions + "evaluates"), seconds=seconds)
        ),
    }


def equal(completion: str, problem: Problem) -> bool:
    """A verifier as a user would write one."""
    return completion.strip() == problem.answer


async def equal_later(completion: str, problem: Problem) -> bool:
    """The same, asynchronous."""
    return equal(completion, problem)


def evaluates(completion: str, problem: Problem) -> bool:
    """A careless verifier: it computes what a completion says, towers of powers too."""
    return eval(completion, {"__builtins__": {}}) == int(problem.answer)


def measure(case: Case, completions: list[str]) -> dict[str, float]:
    """Counts and times of one verifier on all completions."""
    start = perf_counter()
    problems = [replace(case.problem, id=i) for i in range(len(completions))]
    verdicts = case.verifier.batch(completions, problems)
    counts = Counter(map(_kind, verdicts))
    return {
        "judged": len(verdicts),
        "refused": counts["refused"],
        "none": counts["none"],
        "none_without_reason": sum(v.reward is None and not v.reason for v in verdicts),
        "killed": sum(v.killed for v in verdicts),
        "accepted": 0 if case.grades else counts["accepted"],
        "graded": counts["accepted"] if case.grades else 0,
        "longest": max(v.seconds for v in verdicts),
        "seconds": perf_counter() - start,
    }


def _kind(verdict: Verdict) -> str:
    return "none" if verdict.reward is None else "accepted" if verdict.reward > 0 else "refused"


def main() -> None:
    """Run all, print a table."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=1000, help="hostile completions")
    parser.add_argument("--seconds", type=float, default=1.0, help="time limit of a verdict")
    options = parser.parse_args()
    completions = [text for _, text in hostile_completions(100 if options.quick else options.count)]
    result, columns = {}, ("judged", "refused", "none", "killed", "accepted", "graded")
    print(f"{'verifier':<30}" + "".join(f"{c:>10}" for c in (*columns, "longest", "seconds")))
    with TemporaryDirectory() as models:
        for name, case in cases(options.seconds, Path(models)).items():
            row = result[name] = measure(case, completions)
            shown = "".join(f"{row[c]:>10}" for c in columns)
            print(f"{name:<30}{shown}{row['longest']:>10.2f}{row['seconds']:>10.1f}", flush=True)
    accepted = float(sum(row["accepted"] for row in result.values()))
    finish({"verifiers": result, "accepted": accepted}, "accepted", options.out)


if __name__ == "__main__":
    main()

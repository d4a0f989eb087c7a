"""Hostile completions through every verifier: `python -m ssgrpo_lightning.bench.hostile`.

Prints, for each verifier, how many were judged, refused, without a verdict and accepted, and the
longest time that one took. Ends with the number accepted, which must be 0. Nothing may raise.
"""

from collections import Counter
from dataclasses import dataclass
from time import perf_counter

from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers import (
    Choice,
    ExactMatch,
    FinalNumber,
    Isolated,
    JsonSchema,
    Matches,
    MathAnswer,
    Noisy,
    PythonFunction,
    Verifier,
    Weighted,
)
from ssgrpo_lightning.verifiers.hostile import hostile_completions


@dataclass(frozen=True)
class Case:
    """A verifier and the answer that no hostile completion states."""

    verifier: Verifier
    answer: str = "72"


def cases(seconds: float) -> dict[str, Case]:
    """Every verifier that has a wrong answer; `seconds` is the time limit where there is one."""
    unique = {"type": "array", "uniqueItems": True, "minItems": 1, "items": {"type": "string"}}
    slow = {"type": "string", "pattern": "^(a+)+$"}
    functions = "ssgrpo_lightning.bench.hostile."
    hashes = MathAnswer("hashes", seconds=seconds)
    return {
        "FinalNumber": Case(FinalNumber()),
        "FinalNumber after ####": Case(FinalNumber("####")),
        "ExactMatch": Case(ExactMatch()),
        "Choice": Case(Choice("ABCDE"), "B"),
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
    problems = [Problem(i, "", case.answer) for i in range(len(completions))]
    verdicts = case.verifier.batch(completions, problems)
    counts = Counter(map(_kind, verdicts))
    return {
        "judged": len(verdicts),
        "refused": counts["refused"],
        "none": counts["none"],
        "none_without_reason": sum(v.reward is None and not v.reason for v in verdicts),
        "killed": sum(v.killed for v in verdicts),
        "accepted": counts["accepted"],
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
    result, columns = {}, ("judged", "refused", "none", "killed", "accepted")
    print(f"{'verifier':<30}" + "".join(f"{c:>10}" for c in (*columns, "longest", "seconds")))
    for name, case in cases(options.seconds).items():
        row = result[name] = measure(case, completions)
        shown = "".join(f"{row[c]:>10}" for c in columns)
        print(f"{name:<30}{shown}{row['longest']:>10.2f}{row['seconds']:>10.1f}", flush=True)
    accepted = float(sum(row["accepted"] for row in result.values()))
    finish({"verifiers": result, "accepted": accepted}, "accepted", options.out)


if __name__ == "__main__":
    main()

"""Chain arithmetic: reasoning small enough for a laptop, with the exact truth of every step."""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks.task import Split, Task

_STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_ANSWER = re.compile(r"#(\d+)")


@dataclass(frozen=True)
class ChainArithmetic(Task):
    """Sums and differences worked off from left to right, one line a term.

    The prompt ``7+5-3=`` wants the completion ``7+5=12``, ``12-3=9``, ``#9`` on three lines.
    Every partial result lies between 0 and `highest_result`. A prompt belongs to exactly one
    split, by a hash of its text, so that the splits never overlap.
    """

    operations: int = 3
    """Number of additions and subtractions in a problem."""
    highest_number: int = 20
    """Terms are drawn from 1 to this number."""
    highest_result: int = 99
    """Partial results stay between 0 and this number."""
    train_problems: int = 4096
    """Number of distinct training problems."""
    held_out_problems: int = 256
    """Number of problems in each of the validation and test splits."""
    seed: int = 0
    """Seed of the problems; the same seed gives the same problems everywhere."""

    def __post_init__(self) -> None:
        for name in ("operations", "highest_number", "train_problems", "held_out_problems"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ChainArithmetic.{name} is {getattr(self, name)}, must be at least 1: raise it"
                )
        if self.highest_result < self.highest_number:
            raise ValueError(
                f"ChainArithmetic.highest_result is {self.highest_result}, must be at least "
                f"highest_number ({self.highest_number}): raise it or lower highest_number"
            )

    def problems(self, split: Split) -> list[Problem]:
        wanted = self.train_problems if split == "train" else self.held_out_problems
        rng = random.Random(f"chain arithmetic {self.seed} {split}")
        found: dict[str, str] = {}
        # Small fields hold few distinct problems: give up after a bounded number of draws.
        for _ in range(100 * wanted + 10_000):
            if len(found) == wanted:
                break
            prompt, answer = self._draw(rng)
            if _split_of(prompt) == split:
                found[prompt] = answer
        else:
            raise ValueError(
                f"ChainArithmetic has only {len(found)} distinct {split} problems with "
                f"operations={self.operations} and highest_number={self.highest_number}, "
                f"{wanted} were asked for: lower the number or widen the fields"
            )
        return [Problem(i, prompt, answer) for i, (prompt, answer) in enumerate(found.items())]

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        value = rng.randint(1, self.highest_number)
        prompt = str(value)
        for _ in range(self.operations):
            term = rng.randint(1, self.highest_number)
            signs = [s for s in (1, -1) if 0 <= value + s * term <= self.highest_result]
            while not signs:
                term = rng.randint(1, self.highest_number)
                signs = [s for s in (1, -1) if 0 <= value + s * term <= self.highest_result]
            sign = rng.choice(signs)
            value += sign * term
            prompt += f"{'+' if sign > 0 else '-'}{term}"
        return prompt + "=", str(value)

    def solution(self, problem: Problem) -> str:
        """The worked solution that the shipped policy was warm-started on."""
        value, rest = _terms(problem)
        lines = []
        for sign, term in rest:
            result = value + term if sign == "+" else value - term
            lines.append(f"{value}{sign}{term}={result}")
            value = result
        return "\n".join([*lines, f"#{value}"])

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Whether each step is sound.

        Its own arithmetic is right, it takes up the value stated last, and it uses the problem's
        next operator and term. A wrong value taken up rightly is sound.
        """
        value, rest = _terms(problem)
        truth = []
        for index, step in enumerate(steps):
            line, stated = _STEP.fullmatch(step.strip()), _ANSWER.fullmatch(step.strip())
            if line and index < len(rest):
                left, sign, right, result = line.groups()
                exact = int(left) + int(right) if sign == "+" else int(left) - int(right)
                continues = int(left) == value and (sign, int(right)) == rest[index]
                truth.append(continues and int(result) == exact)
                value = int(result)
            else:
                # The answer is sound only after the last term and with the value stated last.
                sound = stated is not None and int(stated.group(1)) == value
                truth.append(sound and index == len(rest))
        return truth


def _split_of(prompt: str) -> Split:
    """One problem in eight is held out for validation, one in eight for the test."""
    bucket = zlib.crc32(prompt.encode()) % 8
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def _terms(problem: Problem) -> tuple[int, list[tuple[str, int]]]:
    """First value and the signed terms that follow it."""
    assert isinstance(problem.prompt, str)
    first, *rest = re.findall(r"([+-]?)(\d+)", problem.prompt)
    return int(first[1]), [(sign, int(number)) for sign, number in rest]

"""Chain arithmetic: reasoning small enough for a laptop, with the exact truth of every step."""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.tasks.task import Split, Task

_COMPUTATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_ANSWER = re.compile(r"#(\d+)")


class Computation(NamedTuple):
    """One computing line, right or wrong: ``7+5=12``."""

    left: int
    sign: str
    right: int
    result: int

    @classmethod
    def exact(cls, left: int, sign: str, right: int) -> "Computation":
        """The line with the right result."""
        return cls(left, sign, right, left + right if sign == "+" else left - right)

    @classmethod
    def read(cls, step: str) -> "Computation | None":
        """The line that a step writes, if it writes one."""
        found = _COMPUTATION.fullmatch(step.strip())
        return found and cls(int(found[1]), found[2], int(found[3]), int(found[4]))

    def __str__(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.result}"


def read_answer(step: str) -> int | None:
    """The number of an answer line ``#9``, if the step is one."""
    found = _ANSWER.fullmatch(step.strip())
    return found and int(found[1])


@dataclass(frozen=True)
class ChainArithmetic(Task):
    """Sums and differences worked off from left to right, one line a term.

    The prompt ``7+5-3=`` wants the completion ``7+5=12``, ``12-3=9``, ``#9`` on three lines.
    Every partial result lies between 0 and `highest_result`. A prompt belongs to exactly one
    split, by a hash of its text, so that the splits never overlap.
    """

    characters: ClassVar[str] = "0123456789+-=#\n"
    """All characters of prompts and solutions; their order is that of the shipped tokenizer."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Lines that say nothing about the problem: always sound, never relevant."""

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
                    f"{type(self).__name__}.{name} is {getattr(self, name)}, "
                    f"must be at least 1: raise it"
                )
        if self.highest_result < self.highest_number:
            raise ValueError(
                f"{type(self).__name__}.highest_result is {self.highest_result}, must be at least "
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
                f"{type(self).__name__} has only {len(found)} distinct {split} problems with "
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

    def solution(self, problem: Problem, rng: random.Random | None = None) -> str:
        """A worked solution, without mistakes and a function of the problem alone.

        With an `rng` it is a demonstration for a warm start, which in some tasks holds mistakes.
        """
        value, rest = _terms(problem)
        lines = []
        for index in range(len(rest)):
            written, value = self._work(value, rest[index:], rng)
            lines += written
        return "\n".join([*lines, f"#{value}"])

    def _work(
        self, value: int, rest: Sequence[tuple[str, int]], rng: random.Random | None
    ) -> tuple[list[str], int]:
        """The lines that work off the first of the remaining terms, and the value they end on."""
        line = Computation.exact(value, *rest[0])
        return [str(line)], line.result

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Whether each step is sound.

        Its own arithmetic is right, it takes up the value stated last, and it uses the problem's
        next operator and term. A wrong value taken up rightly is sound.
        """
        value, rest = _terms(problem)
        truth, done = [], 0
        for step in steps:
            if step.strip() in self.idle:
                truth.append(True)
                continue
            line = Computation.read(step)
            if line and done < len(rest):
                truth.append(line == Computation.exact(value, *rest[done]))
                value = line.result
            else:
                # The answer is sound only after the last term and with the value stated last.
                truth.append(done == len(rest) and read_answer(step) == value)
            done += 1
        return truth

    def relevant(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Whether each step can matter for the reward."""
        return [step.strip() not in self.idle for step in steps]


def _split_of(prompt: str) -> Split:
    """One problem in eight is held out for validation, one in eight for the test."""
    bucket = zlib.crc32(prompt.encode()) % 8
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def _terms(problem: Problem) -> tuple[int, list[tuple[str, int]]]:
    """First value and the signed terms that follow it."""
    assert isinstance(problem.prompt, str)
    first, *rest = re.findall(r"([+-]?)(\d+)", problem.prompt)
    return int(first[1]), [(sign, int(number)) for sign, number in rest]

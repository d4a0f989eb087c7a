"""Variants of chain arithmetic that put step credit to the test, all with exact step truth."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.tasks.arithmetic import ChainArithmetic, Computation, read_answer


@dataclass(frozen=True)
class FillerChain(ChainArithmetic):
    """Zero to two lines that do not matter stand before each computing line.

    ``7+5-3=`` may want ``7+5=12``, ``hm``, ``ok``, ``12-3=9``, ``#9``.
    """

    characters: ClassVar[str] = ChainArithmetic.characters + "sokhm"
    idle: ClassVar[tuple[str, ...]] = ("so", "ok", "hm")

    def solution(self, problem: Problem, rng: random.Random | None = None) -> str:
        *lines, answer = super().solution(problem, rng).split("\n")
        # Seeded by the text: the same problem has the same fillers everywhere.
        fillers = random.Random(f"fillers {problem.prompt}")
        filled = []
        for line in lines:
            filled += [*fillers.choices(self.idle, k=fillers.randint(0, 2)), line]
        return "\n".join([*filled, answer])


@dataclass(frozen=True)
class ErringChain(ChainArithmetic):
    """Demonstrations make mistakes, and go on from the wrong value."""

    mistakes: float = 0.25
    """Share of the computing lines of demonstrations that state a wrong result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self, "mistakes")

    def _work(
        self, value: int, rest: Sequence[tuple[str, int]], rng: random.Random | None
    ) -> tuple[list[str], int]:
        line = Computation.exact(value, *rest[0])
        if rng and rng.random() < self.mistakes:
            # Only results from which the rest of the chain stays in range, so none is negative.
            ahead = list(accumulate((t if s == "+" else -t for s, t in rest[1:]), initial=0))
            allowed = range(-min(ahead), self.highest_result - max(ahead) + 1)
            wrong = [result for result in self._slips(line) if result in allowed]
            line = line._replace(result=rng.choice(wrong or [line.result]))
        return [str(line)], line.result

    def _slips(self, line: Computation) -> list[int]:
        """Wrong results of a line: off by 1 to 9, or by tens, which changes the other digit."""
        sizes = [*range(1, 10), *range(10, 100, 10)]
        return [result for size in sizes for result in (line.result - size, line.result + size)]


@dataclass(frozen=True)
class CarelessChain(ErringChain):
    """Demonstrations mostly forget the carry: a bad habit, likelier than the right line.

    ``7+5-3=`` sees ``7+5=2`` more often than ``7+5=12``. A policy that learnt from them knows
    better and sometimes says so: pass@8 is far above pass@1, so there is much to learn, and its
    confidence says where it decides, not whether it decides well.
    """

    mistakes: float = 0.6
    """Share of the carries that demonstrations forget, where the chain stays in range."""

    def _slips(self, line: Computation) -> list[int]:
        careless = line.left // 10 * 10 + line.result % 10
        return [] if careless == line.result else [careless]


@dataclass(frozen=True)
class DecoyChain(ErringChain):
    """Before the answer stands ``!`` or ``?``, which goes along with success, not causes it.

    ``7+5-3=`` wants ``7+5=12``, ``12-3=9``, ``!``, ``#9``. The mistakes of demonstrations bear a
    leading zero, ``12-3=08``, from which a small policy learns to tell its own.
    """

    characters: ClassVar[str] = ChainArithmetic.characters + "!?"
    idle: ClassVar[tuple[str, ...]] = ("!", "?")

    agreement: float = 0.85
    """How often ``!`` follows a right chain, and ``?`` a wrong one, in demonstrations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self, "agreement")

    def solution(self, problem: Problem, rng: random.Random | None = None) -> str:
        *lines, answer = super().solution(problem, rng).split("\n")
        right = answer == f"#{problem.answer}"
        agrees = rng is None or rng.random() < self.agreement
        return "\n".join([*lines, "!" if right == agrees else "?", answer])

    def _work(
        self, value: int, rest: Sequence[tuple[str, int]], rng: random.Random | None
    ) -> tuple[list[str], int]:
        written, stated = super()._work(value, rest, rng)
        line = Computation.exact(value, *rest[0])
        if stated == line.result:
            return written, stated
        # A leading zero betrays the mistake: else a small policy could not comment on itself.
        return [f"{line.left}{line.sign}{line.right}=0{stated}"], stated


@dataclass(frozen=True)
class RepairChain(ErringChain):
    """A line ``~`` may repair the line before it, and the chain goes on from the repair.

    ``7+5-3=`` may see ``7+5=13``, ``~7+5=12``, ``12-3=9``, ``#9``.
    """

    characters: ClassVar[str] = ChainArithmetic.characters + "~"

    repairs: float = 0.5
    """Share of the mistakes of demonstrations that the next line repairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self, "repairs")

    def _work(
        self, value: int, rest: Sequence[tuple[str, int]], rng: random.Random | None
    ) -> tuple[list[str], int]:
        written, stated = super()._work(value, rest, rng)
        line = Computation.exact(value, *rest[0])
        if rng and stated != line.result and rng.random() < self.repairs:
            return [*written, f"~{line}"], line.result
        return written, stated

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Whether each step is sound.

        As in chain arithmetic; a repair is sound if it would have been so in the place of the
        line before it.
        """
        truth: list[bool] = []
        standing: list[str] = []  # the steps that no later one has repaired
        for step in steps:
            line = step.strip()
            if line.startswith("~"):
                line = line[1:]
                if not (standing and Computation.read(standing[-1]) and Computation.read(line)):
                    truth.append(False)  # it repairs nothing
                    continue
                standing.pop()
            standing.append(line)
            truth.append(super().step_truth(problem, standing)[-1])
        return truth


@dataclass(frozen=True)
class DecisiveLine(ChainArithmetic):
    """Several sums, of which one is asked for: a single line decides.

    The prompt ``12+7,5+9,31-4@2=`` wants ``12+7=19``, ``5+9=14``, ``31-4=27``, ``#14``. First
    terms are drawn from 1 to `highest_result`, and `operations` is the number of sums.
    """

    characters: ClassVar[str] = ChainArithmetic.characters + "@,"

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        sums: list[Computation] = []
        while len(sums) < self.operations:
            left, right = rng.randint(1, self.highest_result), rng.randint(1, self.highest_number)
            drawn = Computation.exact(left, rng.choice("+-"), right)
            if 0 <= drawn.result <= self.highest_result:
                sums.append(drawn)
        decisive = rng.randrange(self.operations)
        listed = ",".join(f"{s.left}{s.sign}{s.right}" for s in sums)
        return f"{listed}@{decisive + 1}=", str(sums[decisive].result)

    def solution(self, problem: Problem, rng: random.Random | None = None) -> str:
        sums, decisive = _sums(problem)
        return "\n".join([*map(str, sums), f"#{sums[decisive].result}"])

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Whether each step is sound.

        A line is the problem's next sum with the right result; the answer is what the decisive
        line stated, right or wrong.
        """
        sums, decisive = _sums(problem)
        truth, stated = [], None
        for index, step in enumerate(steps):
            line, answer = Computation.read(step), read_answer(step)
            if line and index == decisive:
                stated = line.result
            expected = sums[index] if index < len(sums) else None
            truth.append(line == expected if line else answer is not None and answer == stated)
        return truth

    def relevant(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Only the decisive line and the answer can matter for the reward."""
        _, decisive = _sums(problem)
        return [i == decisive or read_answer(s) is not None for i, s in enumerate(steps)]


def _sums(problem: Problem) -> tuple[list[Computation], int]:
    """The sums, worked out, and the index of the decisive one."""
    assert isinstance(problem.prompt, str)
    listed, pointer = problem.prompt.rstrip("=").split("@")
    found = re.findall(r"(\d+)([+-])(\d+)", listed)
    return [Computation.exact(int(a), sign, int(b)) for a, sign, b in found], int(pointer) - 1


def _check_share(task: ChainArithmetic, name: str) -> None:
    """A field that is a share lies between 0 and 1."""
    if not 0 <= getattr(task, name) <= 1:
        raise ValueError(
            f"{type(task).__name__}.{name} is {getattr(task, name)}, must lie between 0 and 1: "
            f"it is a share, so write 0.25 for a quarter"
        )

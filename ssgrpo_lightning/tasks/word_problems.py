"""Short arithmetic word problems for a small chat model; generated, nothing to download."""

import random
import zlib
from dataclasses import dataclass

from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.tasks.task import Split, Task

_NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps")
_GAINS = ("{name} finds {n} more.", "{name} buys {n} more.", "A friend gives {name} {n} more.")
_LOSSES = ("{name} gives away {n}.", "{name} loses {n}.", "{name} sells {n}.")


@dataclass(frozen=True)
class WordProblems(Task):
    """Somebody has some things, gets and gives some, and is asked how many are left.

    A problem belongs to exactly one split, by a hash of its text.
    """

    changes: int = 2
    """Number of times the count changes."""
    highest_number: int = 12
    """Numbers are drawn from 2 to this one."""
    instruction: str = "Write one short line for each step. End with: Answer: <number>"
    """Text that follows every question."""
    train_problems: int = 1024
    """Number of distinct training problems."""
    held_out_problems: int = 32
    """Number of problems in each of the validation and test splits."""
    seed: int = 0
    """Seed of the problems."""

    def __post_init__(self) -> None:
        for name, least in (("changes", 1), ("highest_number", 3), ("train_problems", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"WordProblems.{name} is {getattr(self, name)}, must be at least {least}: "
                    "raise it"
                )

    def problems(self, split: Split) -> list[Problem]:
        wanted = self.train_problems if split == "train" else self.held_out_problems
        rng = random.Random(f"word problems {self.seed} {split}")
        found: dict[str, str] = {}
        while len(found) < wanted:
            text, answer = self._draw(rng)
            bucket = zlib.crc32(text.encode()) % 8
            if split == ("validation" if bucket == 0 else "test" if bucket == 1 else "train"):
                found[text] = answer
        return [
            Problem(i, ({"role": "user", "content": f"{text} {self.instruction}"},), answer)
            for i, (text, answer) in enumerate(found.items())
        ]

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        name, things = rng.choice(_NAMES), rng.choice(_THINGS)
        count = rng.randint(2, self.highest_number)
        sentences = [f"{name} has {count} {things}."]
        for _ in range(self.changes):
            number = rng.randint(2, self.highest_number)
            gains = number >= count or rng.random() < 0.5
            count += number if gains else -number
            sentences.append(rng.choice(_GAINS if gains else _LOSSES).format(name=name, n=number))
        return f"{' '.join(sentences)} How many {things} does {name} have now?", str(count)

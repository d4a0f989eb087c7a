"""Problems that reasoning-gym generates: more than a hundred tasks, fresh by seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from ssgrpo_lightning.records import Message, Problem
from ssgrpo_lightning.tasks.task import Split, Task

# The library draws problem i of seed s from s + i: splits and seeds must lie further apart.
_BLOCK = 10_000_000
_ORDER: tuple[Split, ...] = ("train", "validation", "test")
# Draws for one problem that is wanted, before a small task counts as exhausted.
_TRIES = 20


@dataclass(frozen=True)
class ReasoningGym(Task):
    """A task of reasoning-gym (2505.24760), judged by `ReasoningGymScore`; needs the extra ``gym``.

    Every split draws from seeds of its own, and a question belongs to one split only: training
    leaves out what validation and test ask. A few tasks of the library (such as ``knight_swap``)
    follow the order of Python's sets: for the same problems in every process, set PYTHONHASHSEED.
    """

    name: str = "chain_sum"
    """Name of the task; a wrong one lists all."""
    config: dict[str, Any] = field(default_factory=dict)
    """Difficulty: fields of the task's own config; a wrong one lists all."""
    instruction: str = "Give the final answer between <answer> and </answer>."
    """Text that follows every question."""
    chat: bool = True
    """Render prompts with the policy's chat template."""
    system: str | None = None
    """System message that opens every chat."""
    train_problems: int = 1024
    """Number of different training problems."""
    held_out_problems: int = 128
    """Number of different problems in each of the validation and test splits."""
    seed: int = 0
    """Seed of the problems; another seed gives fresh ones."""

    def __post_init__(self) -> None:
        known = _configs()
        if self.name not in known:
            raise ValueError(
                f"ReasoningGym.name is {self.name!r}, which is no task of reasoning-gym: use one "
                f"of {', '.join(sorted(known))}"
            )
        allowed = {f.name for f in fields(known[self.name])} - {"seed", "size"}
        if wrong := sorted(set(self.config) - allowed):
            raise ValueError(
                f"ReasoningGym.config has {', '.join(wrong)}, but {self.name} knows "
                f"{', '.join(sorted(allowed))}: use these; seed and number are fields of the task"
            )
        for name in ("train_problems", "held_out_problems"):
            if not 1 <= getattr(self, name) < _BLOCK // _TRIES:
                raise ValueError(
                    f"ReasoningGym.{name} is {getattr(self, name)}, must be from 1 to "
                    f"{_BLOCK // _TRIES - 1}: each split has that many seeds"
                )
        if self.system is not None and not self.chat:
            raise ValueError(
                f"ReasoningGym.system is {self.system!r} but ReasoningGym.chat is false, so it "
                "would be ignored: set chat to true or remove system"
            )
        dataset(self.name, self.config, size=1)

    def problems(self, split: Split) -> list[Problem]:
        taken: set[str] = set()
        # Held-out questions come first: they must not depend on how much is trained on.
        for earlier in ("validation", "test"):
            if earlier == split:
                break
            taken |= {entry["question"] for entry in self._entries(earlier, taken)}
        metadata = {"gym": self.name, "config": self.config}
        return [
            Problem(
                id=i,
                prompt=self._prompt(entry["question"]),
                # Some tasks have many right answers and name none.
                answer="" if entry["answer"] is None else str(entry["answer"]),
                metadata={**metadata, "entry": entry},
            )
            for i, entry in enumerate(self._entries(split, taken))
        ]

    def _entries(self, split: Split, taken: set[str]) -> list[dict[str, Any]]:
        """Different entries of a split, none of whose questions is taken."""
        wanted = self.train_problems if split == "train" else self.held_out_problems
        found: dict[str, dict[str, Any]] = {}
        for entry in self._drawn(split, wanted * _TRIES):
            if entry["question"] not in taken:
                found.setdefault(entry["question"], entry)
            if len(found) == wanted:
                return list(found.values())
        name = "train_problems" if split == "train" else "held_out_problems"
        raise ValueError(
            f"ReasoningGym.{name} is {wanted}, but {self.name} with config {self.config} gave only "
            f"{len(found)} different {split} problems in {wanted * _TRIES} draws: lower "
            f"{name}, or make the task more varied"
        )

    def _drawn(self, split: Split, size: int) -> Iterator[dict[str, Any]]:
        seed = (self.seed * len(_ORDER) + _ORDER.index(split)) * _BLOCK
        source = dataset(self.name, self.config, size, seed)
        return (source[i] for i in range(size))

    def _prompt(self, question: str) -> str | tuple[Message, ...]:
        text = f"{question}\n{self.instruction}" if self.instruction else question
        if not self.chat:
            return text
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return (*opening, {"role": "user", "content": text})


def dataset(name: str, config: dict[str, Any], size: int, seed: int = 0) -> Any:
    """A dataset of reasoning-gym.

    Raises:
        ValueError: The library refuses the config, or is not installed.
    """
    _configs()
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"ReasoningGym.config is {json.dumps(config, default=str)}, which {name} refuses: "
            f"{error}; mend it"
        ) from error


def _configs() -> dict[str, type]:
    """The config class of every task, by name."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            "the task ReasoningGym needs the package reasoning-gym: "
            "pip install 'ssgrpo-lightning[gym]'"
        ) from error
    return {name: config for name, (_, config) in DATASETS.items()}

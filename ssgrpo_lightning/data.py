"""DataModules of grouped rollouts: problems to sample them from, or a file to read them from."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from ssgrpo_lightning.curriculum import Curriculum, PassRates, Uniform
from ssgrpo_lightning.functional import counted_generator
from ssgrpo_lightning.leaks import LeakCheck
from ssgrpo_lightning.records import Problem, Rollouts, ScoredRollouts
from ssgrpo_lightning.rollouts import Judge
from ssgrpo_lightning.segmenters import ByLine, Segmenter
from ssgrpo_lightning.stored import from_rows, read_rows
from ssgrpo_lightning.tasks import Split, Task
from ssgrpo_lightning.verifiers import Verifier

Pick = Callable[[Sequence[int], torch.Generator], list[int]]
REFILL = 1_000_033  # keeps the order of further problems apart from that of batches


def loader_of(batches: Sequence[Any]) -> DataLoader:
    """A loader that yields ready batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # pyright: ignore


class ProblemLoader:
    """Batches of problems: shuffled anew each epoch, the same for any number of ranks, resumable.

    A rank takes every `ranks`-th problem of the batch, so that its share does not depend on the
    others. Sized, because Lightning prefetches from loaders without a length.

    Args:
        problems: The problems of the split.
        batch: Problems of a batch, over all ranks.
        seed: Seed of the order.
        pick: What a batch is made of, given the problems that are due.
        rank: Which rank this is.
        ranks: How many there are.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        batch: int,
        seed: int,
        pick: Pick,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.problems, self.batch, self.seed, self.pick = problems, batch, seed, pick
        self.rank, self.ranks = rank, ranks
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return len(self.problems) // self.batch

    def __iter__(self) -> Iterator[list[Problem]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.problems), generator=generator).tolist()
        while self.position < len(self):
            due = order[self.position * self.batch :][: self.batch]
            rows = self.pick(due, counted_generator(self.seed, self.epoch, self.position))
            # Counted before the batch is handed out: a checkpoint is written after its update.
            self.position += 1
            yield [self.problems[i] for i in rows[self.rank :: self.ranks]]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class RolloutDataModule(L.LightningDataModule):
    """Owns the problems and the buffer of grouped rollouts that both modules train from.

    Args:
        task: Where problems come from.
        verifier: Judges completions.
        segmenter: Cuts completions into steps.
        group_size: Rollouts per problem (K); the group is what an advantage is relative to.
        rollouts_per_update: Rollouts of one policy update, over all ranks.
        evaluation_verifier: Judges completions in validation and test; null: `verifier`.
        validation_batch: Problems evaluated together.
        predict_split: Split whose problems ``predict`` samples groups for.
        predict_problems: Number of those problems; null: all.
        curriculum: Which problems come next, by how often each was solved so far.
        leak_check: What is done about held-out problems that nearly stand in training.
        seed: Seed of the order of problems.
    """

    def __init__(
        self,
        task: Task,
        verifier: Verifier,
        segmenter: Segmenter = ByLine(),
        group_size: int = 8,
        rollouts_per_update: int = 256,
        evaluation_verifier: Verifier | None = None,
        validation_batch: int = 256,
        predict_split: Split = "train",
        predict_problems: int | None = 256,
        curriculum: Curriculum = Uniform(),
        leak_check: LeakCheck = LeakCheck(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_groups(group_size, rollouts_per_update)
        self.task, self.judge = task, Judge(verifier, segmenter)
        self.evaluation_judge = Judge(evaluation_verifier or verifier, segmenter)
        self.group_size, self.rollouts_per_update = group_size, rollouts_per_update
        self.validation_batch = validation_batch
        self.predict_split: Split = predict_split
        self.predict_problems = predict_problems
        self.leak_check = leak_check
        self.seed = seed
        self.buffer: deque[ScoredRollouts] = deque()
        self.problems: dict[Split, Sequence[Problem]] = {}
        self.curriculum, self.known = curriculum, PassRates.unknown(0)
        self.further_taken = 0

    def setup(self, stage: str) -> None:
        splits: dict[str, tuple[Split, ...]] = {
            "fit": ("train", "validation"),
            "validate": ("validation",),
            "test": ("test",),
            "predict": (self.predict_split,),
        }
        for split in splits[stage]:
            if split not in self.problems:
                self.problems[split] = self.task.problems(split)
                self._check_leaks(split)
        wanted = self.rollouts_per_update // self.group_size
        if stage == "fit" and len(self.problems["train"]) < wanted:
            raise ValueError(
                f"data.rollouts_per_update is {self.rollouts_per_update}, which needs {wanted} "
                f"problems, but {type(self.task).__name__} has {len(self.problems['train'])} to "
                "train on: lower rollouts_per_update or give the task more problems"
            )

        if stage == "fit" and not len(self.known.rate):
            self.known = PassRates.unknown(len(self.problems["train"]))
            self.places = {p.id: place for place, p in enumerate(self.problems["train"])}

    def note(self, problems: Sequence[int], rewards: Sequence[float]) -> None:
        """Tell the curriculum how groups of all ranks ended: mean reward, NaN without a verdict.

        Args:
            problems: Number (`Problem.id`) of the problem of each group.
            rewards: Mean reward of each group.
        """
        places = [self.places[number] for number in problems]
        self.known = self.curriculum.follow(self.known, places, rewards)

    def _pick(self, due: Sequence[int], generator: torch.Generator) -> list[int]:
        return self.curriculum.pick(due, self.known, generator)

    def further(self, count: int) -> list[Problem]:
        """The next `count` problems for this rank, from a second endless stream in random order.

        Every rank must ask for as many, so that all know where the stream stands.
        """
        problems, (rank, ranks) = self.problems["train"], self._ranks()
        start, due = self.further_taken, []
        self.further_taken += count * ranks
        while len(due) < count * ranks:
            epoch, position = divmod(start + len(due), len(problems))
            generator = counted_generator(self.seed, REFILL, epoch)
            order = torch.randperm(len(problems), generator=generator).tolist()
            due += order[position : position + count * ranks - len(due)]
        generator = counted_generator(self.seed, REFILL, start, count)
        return [problems[i] for i in self._pick(due, generator)[rank::ranks]]

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self.known), "further_taken": self.further_taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        count = len(self.problems["train"])
        if len(state_dict["rate"]) != count:
            raise ValueError(
                f"the checkpoint knows the pass rates of {len(state_dict['rate'])} problems, but "
                f"{type(self.task).__name__} has {count} to train on: resume with the task it had"
            )
        self.further_taken = state_dict["further_taken"]
        self.known = PassRates(state_dict["rate"], state_dict["streak"])

    def _ranks(self) -> tuple[int, int]:
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)

    def _check_leaks(self, split: Split) -> None:
        """Compare a held-out split with the training problems, and say what came of it."""
        if split != "train" and self.leak_check.action != "skip":
            if "train" not in self.problems:
                self.problems["train"] = self.task.problems("train")
            rank_zero_info(self.leak_check(split, self.problems[split], self.problems["train"]))

    def store(self, batch: ScoredRollouts, keep: int) -> None:
        """Add the groups of an update to the buffer; the oldest beyond `keep` updates leave it."""
        self.buffer.append(batch)
        while len(self.buffer) > keep:
            self.buffer.popleft()

    def train_dataloader(self) -> ProblemLoader:
        rank, ranks = self._ranks()
        batch = self.rollouts_per_update // self.group_size
        if batch % ranks:
            raise ValueError(
                f"data.rollouts_per_update is {self.rollouts_per_update}, that is {batch} groups, "
                f"not divisible over {ranks} ranks: use a multiple of {ranks * self.group_size}"
            )
        return ProblemLoader(self.problems["train"], batch, self.seed, self._pick, rank, ranks)

    def val_dataloader(self) -> DataLoader:
        return self._share(self.problems["validation"])

    def test_dataloader(self) -> DataLoader:
        return self._share(self.problems["test"])

    def predict_dataloader(self) -> DataLoader:
        return self._share(self.problems[self.predict_split][: self.predict_problems])

    def _share(self, problems: Sequence[Problem]) -> DataLoader:
        rank, ranks = self._ranks()
        size = self.validation_batch * ranks
        batches = [list(problems[i : i + size]) for i in range(0, len(problems), size)]
        if len(batches) > 1 and len(batches[-1]) < ranks:
            # Every rank needs something of every batch, as all make the same calls.
            batches[-2:] = [batches[-2] + batches[-1]]
        return loader_of([batch[rank::ranks] for batch in batches])

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        # Problems are text; Lightning cannot look into frozen records.
        return batch


class StoredRollouts(L.LightningDataModule):
    """Grouped rollouts that ``predict`` stored, for fitting the estimator alone.

    Args:
        path: JSON-lines file that ``predict`` wrote.
        groups_per_batch: Groups of one optimiser step.
        validation_share: Share of the groups held out for validation: the last ones of the file.
        seed: Seed of the order of groups.
    """

    def __init__(
        self,
        path: str,
        groups_per_batch: int = 32,
        validation_share: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < validation_share < 1:
            raise ValueError(
                f"data.validation_share is {validation_share}, must be between 0 and 1: use 0.2"
            )
        self.path, self.groups_per_batch = path, groups_per_batch
        self.validation_share, self.seed = validation_share, seed

    def setup(self, stage: str) -> None:
        rollouts = from_rows(list(read_rows(Path(self.path))))
        groups = rollouts.group.unique()
        held_out = max(1, round(len(groups) * self.validation_share))
        if len(groups) <= held_out:
            raise ValueError(
                f"{self.path} holds {len(groups)} groups, of which {held_out} would be held out: "
                "store more with `predict`"
            )
        self.rollouts, self.train_groups = rollouts, groups[:-held_out]
        self.validation_groups = groups[-held_out:]

    def _batches(self, groups: torch.Tensor) -> DataLoader:
        parts = groups.split(self.groups_per_batch)
        rows = [torch.isin(self.rollouts.group, part).nonzero()[:, 0] for part in parts]
        return loader_of([self.rollouts.select(r) for r in rows])

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.train_groups), generator=generator)
        return self._batches(self.train_groups[order])

    def val_dataloader(self) -> DataLoader:
        return self._batches(self.validation_groups)

    def transfer_batch_to_device(
        self, batch: Rollouts, device: torch.device, dataloader_idx: int
    ) -> Rollouts:
        return batch.to(device)


def _check_groups(group_size: int, rollouts_per_update: int) -> None:
    """Refuse groups that carry no contrast and batches that would split one."""
    if group_size < 2:
        raise ValueError(
            f"data.group_size is {group_size}, must be at least 2: an advantage is relative to the "
            "other rollouts of its group; 8 is usual"
        )
    if group_size < 4:
        warnings.warn(
            f"data.group_size is {group_size}: below 4 most groups hold equal rewards and the "
            "contrast within the others is weak; 8 is usual",
            stacklevel=3,
        )
    if rollouts_per_update < group_size or rollouts_per_update % group_size:
        raise ValueError(
            f"data.rollouts_per_update is {rollouts_per_update}, must be a multiple of "
            f"data.group_size ({group_size}): groups are never split; use "
            f"{max(1, round(rollouts_per_update / group_size)) * group_size}"
        )

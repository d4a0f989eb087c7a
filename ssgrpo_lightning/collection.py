"""Which groups make up an update. One abstract class, then its members.

Nothing is kept for a later update, so that no rollout is older than the policy that learns from it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ssgrpo_lightning import parallel
from ssgrpo_lightning.functional import group_copies, mixed_groups
from ssgrpo_lightning.records import Problem, Rollouts
from ssgrpo_lightning.rollouts import join

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO

TURN = 1 << 16  # noise of one call of the engine within an update is apart from that of the next


@dataclass(frozen=True)
class Collection(ABC):
    """Samples the rollouts of an update, of one local shape on every rank.

    Every rank makes the same number of calls to the engine: sums over ranks decide about each.
    """

    redraws: int = 0
    """Times that completions which their group has already are drawn again; 0: never. It makes
    groups more diverse than the policy is: rare completions are then counted for too much."""

    def __post_init__(self) -> None:
        if not 0 <= self.redraws < 16:
            raise ValueError(
                f"{type(self).__name__}.redraws is {self.redraws}, must be from 0 to 15: 2 is a "
                "beginning, and what is still alike then stays"
            )

    @abstractmethod
    def __call__(
        self, module: "SSGRPO", problems: Sequence[Problem]
    ) -> tuple[Rollouts, dict[str, Tensor]]:
        """Rollouts of as many groups as there are problems, and what to log of how they were got.

        Args:
            module: What samples.
            problems: Of this rank; the first to be tried.
        """

    def draw(self, module: "SSGRPO", problems: Sequence[Problem], attempt: int = 0) -> Rollouts:
        """A group of each problem, redrawn where asked; the curriculum hears how they ended."""
        size, turns = module.datamodule.group_size, attempt * (self.redraws + 1)
        rollouts = module.collect(problems, size, module.sampling, replica=turns * TURN)
        for turn in range(1, self.redraws + 1):
            alike = group_copies(rollouts.tokens, rollouts.sampled, rollouts.group)[1]
            if not float(parallel.global_sum(module, alike.float().sum())):
                break
            rollouts = _redrawn(module, rollouts, alike, (turns + turn) * TURN)
        means = rollouts.rewards.view(-1, size).nanmean(1)
        numbers = torch.tensor([p.id for p in problems], device=means.device)
        everyone = parallel.gathered(module, torch.stack([numbers.double(), means.double()], 1))
        module.datamodule.note(everyone[:, 0].long().tolist(), everyone[:, 1].tolist())
        return rollouts


def _redrawn(module: "SSGRPO", rollouts: Rollouts, which: Tensor, replica: int) -> Rollouts:
    """The rollouts with new draws in place of some."""
    rows = which.nonzero()[:, 0]
    # A rank without any draws one for nothing, so that none waits for the others.
    asked = rows if len(rows) else rows.new_zeros(1)
    problems = [rollouts.problems[i] for i in asked.tolist()]
    new = module.collect(problems, 1, module.sampling, replica=replica)
    order = torch.arange(len(rollouts), device=rows.device)
    order[rows] = len(rollouts) + torch.arange(len(rows), device=rows.device)
    return replace(join([rollouts, new]).select(order), group=rollouts.group)


@dataclass(frozen=True)
class OneBatch(Collection):
    """One group of each problem, whatever its rewards."""

    def __call__(
        self, module: "SSGRPO", problems: Sequence[Problem]
    ) -> tuple[Rollouts, dict[str, Tensor]]:
        rollouts = self.draw(module, problems)
        return rollouts, _tally(module, [rollouts], rollouts)


@dataclass(frozen=True)
class DynamicSampling(Collection):
    """Groups whose rewards are all equal are replaced by groups of further problems.

    DAPO's dynamic sampling (2503.14476, eq. 11): every rank tries further problems until it has as
    many groups with two different rewards as it had problems, or has tried `max_tries` times. Dead
    groups then fill its place up, so that the shape of an update is always the same; with nothing
    but dead ones the update says so and goes on. More groups than needed are dropped and counted:
    they would be older than the policy at the next update. What counts is the outcome, not what is
    taken off it for length.
    """

    max_tries: int = 4
    """Calls to the engine per update, the first included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_tries <= 1024:
            raise ValueError(
                f"DynamicSampling.max_tries is {self.max_tries}, must be from 1 to 1024: 4 is usual"
            )

    def __call__(
        self, module: "SSGRPO", problems: Sequence[Problem]
    ) -> tuple[Rollouts, dict[str, Tensor]]:
        wanted, drawn = len(problems), [self.draw(module, problems)]
        while len(drawn) < self.max_tries:
            live, tried = _live_and_all(module, drawn)
            missing = int(parallel.global_max(module, _scalar(module, max(wanted - live, 0))))
            if not missing:
                break
            sums = torch.stack([_scalar(module, x) for x in (live, tried)])
            live, tried = parallel.global_sum(module, sums).tolist()
            # As many as should hold the missing ones, by the share that was mixed so far.
            count = min(wanted, math.ceil(missing * tried / max(live, 1)))
            drawn.append(self.draw(module, module.datamodule.further(count), len(drawn)))
        kept = _first_live(drawn, wanted, module)
        missing = _scalar(module, wanted - _live_and_all(module, [kept])[0])
        if dead := int(parallel.global_sum(module, missing)):
            rank_zero_info(
                f"update {module.policy_step + 1}: after {len(drawn)} tries {dead} groups of equal "
                "rewards fill places that groups with different ones were sought for"
            )
        return kept, _tally(module, drawn, kept)


def _live_and_all(module: "SSGRPO", parts: Sequence[Rollouts]) -> tuple[int, int]:
    """Groups of this rank with two different rewards, and all of its groups."""
    live = torch.cat([_live(part, module) for part in parts])
    return int(live.sum()), len(live)


def _live(rollouts: Rollouts, module: "SSGRPO") -> Tensor:
    """True for each group with two different rewards."""
    mixed = mixed_groups(rollouts.rewards, rollouts.group)
    return mixed.view(-1, module.datamodule.group_size).any(1)


def _first_live(drawn: Sequence[Rollouts], wanted: int, module: "SSGRPO") -> Rollouts:
    """The first `wanted` groups with two different rewards; dead ones behind them, if too few."""
    everything, size = join(drawn), module.datamodule.group_size
    first = _live(everything, module).logical_not().long().argsort(stable=True)[:wanted]
    rows = (first[:, None] * size + torch.arange(size, device=first.device)).flatten()
    numbers = torch.arange(wanted, device=first.device).repeat_interleave(size)
    return replace(everything.select(rows), group=numbers)


def _tally(module: "SSGRPO", drawn: Sequence[Rollouts], kept: Rollouts) -> dict[str, Tensor]:
    """What an update drew, over all ranks, under the same names for every collection."""
    live, tried = _live_and_all(module, drawn)
    live_kept, wanted = _live_and_all(module, [kept])
    rewards = torch.cat([part.rewards for part in drawn])
    won, known = rewards.nansum(), (~rewards.isnan()).sum()
    surplus, dead = live - live_kept, (tried - live) - (wanted - live_kept)
    sums = torch.stack([_scalar(module, x) for x in (surplus, dead, won, known)])
    surplus, dead, won, known = parallel.global_sum(module, sums)
    return {
        "sampling/tries": _scalar(module, len(drawn)),
        "sampling/dead_dropped": dead,
        "sampling/mixed_dropped": surplus,
        "sampling/reward": won / known.clamp(min=1),
    }


def _scalar(module: "SSGRPO", x: float | Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32, device=module.device)

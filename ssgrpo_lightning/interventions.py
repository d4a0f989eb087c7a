"""Successes changed in one step, to see what an estimator makes of it. Knows no tokenizer.

One abstract class, then its members. A changed rollout stands in its group in place of the
original and keeps its reward: what a group knows about a step comes from the *other* rollouts, so
that nothing is given away, and the value before the first step stays the same. At most one rollout
of a group is changed, and what is put in comes from other groups, about whose steps the outcomes of
the group say nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssgrpo_lightning.functional import above_chance, falls_at, step_fingerprints, step_lengths
from ssgrpo_lightning.records import Rollouts, StepScores

Rows = Int[Tensor, " row"]


class Edit(NamedTuple):
    """Which tokens of which rollouts are replaced by which others; one entry per changed rollout.

    Attributes:
        rows: Rollouts that change.
        step: The step that the intervention is about, as counted afterwards.
        start: First column that is replaced.
        stop: Column after the last that is replaced.
        donor: Rollout from which the new tokens come.
        first: Column of the first of them.
        length: How many they are.
    """

    rows: Rows
    step: Rows
    start: Rows
    stop: Rows
    donor: Rows
    first: Rows
    length: Rows


@dataclass(frozen=True)
class Intervened:
    """Rollouts before and after an intervention.

    Attributes:
        original: Whole groups as they were sampled.
        changed: The same, with one step of some of them changed.
        rows: Which rollouts changed.
        step: The step of each that the intervention is about, as counted in `changed`.
        was: Where what now stands in that step stood in `original`.
    """

    original: Rollouts
    changed: Rollouts
    rows: Rows
    step: Rows
    was: Rows

    def skill(
        self, score: Callable[[Rollouts], StepScores]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """How many corrupted steps the values find beyond chance, and how many there could be.

        Found is a step at which the value falls, most there, and not before (`falls_at`); of T
        steps, chance finds one in T. The quotient is the step skill: 1 if every one is found, about
        0 for values that know nothing, whatever they prefer. Exact truth stays a little under 1: a
        lucky success has a fault of its own, at which the value has fallen before.

        Args:
            score: The estimator, as a function of rollouts.
        """
        if not len(self.rows):
            return self._nothing()
        rows, (before, after) = self.rows, (score(self.original), score(self.changed))
        found = falls_at(
            after.values[rows],
            before.values[rows],
            after.baseline[rows],
            after.mask[rows],
            self.step,
            self.was,
        )
        return above_chance(found, 1 / after.mask[rows].sum(1))

    def gain_share(
        self, score: Callable[[Rollouts], StepScores]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Size of the gains ``|D_t|`` at the steps in question, and were all steps' gains even.

        The quotient is 1 for credit without preference, and 0 where the step gets none.

        Args:
            score: The estimator, as a function of rollouts.
        """
        if not len(self.rows):
            return self._nothing()
        after = score(self.changed)
        values, mask = after.values[self.rows], after.mask[self.rows]
        earlier = torch.cat([after.baseline[self.rows, None], values[:, :-1]], 1)
        sizes = torch.where(mask, (values - earlier).abs(), 0.0)
        return sizes.gather(1, self.step[:, None]).sum(), (sizes.sum(1) / mask.sum(1)).sum()

    def _nothing(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        zero = torch.zeros((), device=self.rows.device)
        return zero, zero


class Intervention(ABC):
    """Changes one step of a rollout; the tokens after it stay as they are."""

    shift: ClassVar[int] = 0
    """By how many steps the rollout grows."""

    @abstractmethod
    def edit(self, rollouts: Rollouts, rows: Rows, generator: torch.Generator) -> Edit:
        """What to change in the given rollouts; those that cannot be changed are left out."""

    def __call__(self, rollouts: Rollouts, count: int, generator: torch.Generator) -> Intervened:
        """Change one step in one success of up to `count` groups.

        The log-probabilities and entropies of changed rollouts are not what the policy would say:
        it has to read them anew (`PolicyModule.reread`).
        """
        chosen = _successes(rollouts, count, generator)
        if not len(chosen):
            return Intervened(rollouts, rollouts, chosen, chosen, chosen)
        groups = rollouts.select(_groups_of(rollouts, chosen))
        edit = self.edit(groups, _successes(groups, count, generator), generator)
        changed = splice(groups, edit, self.shift)
        return Intervened(groups, changed, edit.rows, edit.step, edit.step - self.shift)


class Corruption(Intervention):
    """Takes a step's soundness away: what follows is no longer supported by it."""


@dataclass(frozen=True)
class SwapToken(Corruption):
    """Another token in place of one of the step's: what another group has there.

    Where steps are calculations it mostly is another digit. Never the last token of a step of
    several, which may be the separator.
    """

    def edit(self, rollouts: Rollouts, rows: Rows, generator: torch.Generator) -> Edit:
        spans, tokens = _Spans.of(rollouts), rollouts.tokens
        rows, step = spans.draw(rows, generator)
        offset = _uniform((spans.length[rows, step] - 1).clamp(min=1), generator)
        start = spans.start[rows, step] + offset
        # What every rollout of the batch has in that step and place, if it reaches so far.
        there = (spans.start[:, step] + offset).T.clamp(max=tokens.shape[1] - 1)
        other = tokens[torch.arange(len(tokens), device=tokens.device), there]
        needed = offset + (spans.length[rows, step] > 1)
        fits = (needed[:, None] < spans.length[:, step].T) & (other != tokens[rows, start][:, None])
        kept, donor = _choose(fits & _other_groups(rollouts, rows), generator)
        first, start = there[kept, donor], start[kept]
        return Edit(rows[kept], step[kept], start, start + 1, donor, first, torch.ones_like(donor))


@dataclass(frozen=True)
class SwapStep(Corruption):
    """Another step in place of this one: what another group has as the same step."""

    def edit(self, rollouts: Rollouts, rows: Rows, generator: torch.Generator) -> Edit:
        spans = _Spans.of(rollouts)
        rows, step = spans.draw(rows, generator)
        text = step_fingerprints(rollouts.tokens, rollouts.step, rollouts.steps)
        # An end stays an end, so that no end-of-sequence token gets into the middle.
        ends = (spans.count[rows] == step + 1)[:, None] == (spans.count == step[:, None] + 1)
        differs = (text[:, step] != text[rows, step]).T & (spans.length[:, step].T > 0)
        kept, donor = _choose(ends & differs & _other_groups(rollouts, rows), generator)
        rows, step = rows[kept], step[kept]
        start, first = spans.start[rows, step], spans.start[donor, step]
        stop = start + spans.length[rows, step]
        return Edit(rows, step, start, stop, donor, first, spans.length[donor, step])


@dataclass(frozen=True)
class DeleteStep(Corruption):
    """The step is left out, and the next stands in its place; never the last step."""

    shift: ClassVar[int] = -1

    def edit(self, rollouts: Rollouts, rows: Rows, generator: torch.Generator) -> Edit:
        spans = _Spans.of(rollouts)
        rows, step = spans.draw(rows, generator, spare=1)
        text = step_fingerprints(rollouts.tokens, rollouts.step, rollouts.steps)
        # Of two equal neighbours one may go without harm.
        kept = text[rows, step] != text[rows, step + 1]
        rows, step = rows[kept], step[kept]
        start = spans.start[rows, step]
        stop = start + spans.length[rows, step]
        return Edit(rows, step, start, stop, rows, start, torch.zeros_like(rows))


@dataclass(frozen=True)
class RepeatStep(Intervention):
    """Plants a decoy: a step of the success stands there twice, which changes nothing."""

    shift: ClassVar[int] = 1

    def edit(self, rollouts: Rollouts, rows: Rows, generator: torch.Generator) -> Edit:
        spans = _Spans.of(rollouts)
        rows, step = spans.draw(rows, generator, spare=1)
        first, length = spans.start[rows, step], spans.length[rows, step]
        return Edit(rows, step + 1, first + length, first + length, rows, first, length)


def splice(rollouts: Rollouts, edit: Edit, shift: int = 0) -> Rollouts:
    """Replace spans of tokens; what stands after them moves up or down with its rollout.

    Args:
        rollouts: Rollouts to change; texts stay those of the original.
        edit: What to replace by what.
        shift: What is added to the index of the steps after the replaced span.
    """
    count, width = rollouts.tokens.shape
    row = torch.arange(count, device=rollouts.tokens.device)

    def of_all(values: Rows, otherwise: int) -> Int[Tensor, "rollout 1"]:
        filled = torch.full_like(row, otherwise)
        return filled.index_put((edit.rows,), values)[:, None]

    start, stop = of_all(edit.start, width), of_all(edit.stop, width)
    length, donor, first = (of_all(x, 0) for x in (edit.length, edit.donor, edit.first))
    grown = length - (stop - start)
    column = torch.arange(width + max(int(grown.max()), 0), device=row.device)[None]
    put_in = (column >= start) & (column < start + length)
    after = column >= start + length
    own = torch.where(after, column - grown, column)
    source_row = torch.where(put_in, donor, row[:, None])
    source = torch.where(put_in, first + column - start, own)
    exists = (source >= 0) & (source < width)

    def moved(x: Tensor) -> Tensor:
        taken = x[source_row, source.clamp(0, width - 1)]
        return torch.where(exists, taken, torch.zeros_like(taken))

    sampled, step = moved(rollouts.sampled), moved(rollouts.step)
    step = torch.where(put_in, of_all(edit.step, 0), step + shift * after)
    return replace(
        rollouts,
        tokens=moved(rollouts.tokens),
        attended=moved(rollouts.attended),
        sampled=sampled,
        step=torch.where(sampled, step, -1),
        logprobs=moved(rollouts.logprobs),
        entropy=moved(rollouts.entropy),
    )


class _Spans(NamedTuple):
    """Where the steps of every rollout stand."""

    start: Int[Tensor, "rollout step"]
    length: Int[Tensor, "rollout step"]
    count: Int[Tensor, " rollout"]

    @classmethod
    def of(cls, rollouts: Rollouts) -> "_Spans":
        length = step_lengths(rollouts.step, rollouts.steps)
        begin = rollouts.sampled.int().argmax(1)[:, None]
        return cls(begin + length.cumsum(1) - length, length, (length > 0).sum(1))

    def draw(
        self, rows: Rows, generator: torch.Generator, spare: int = 0
    ) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
        """A step of each of the rollouts that keep two to tell apart; never one of the last."""
        rows = rows[self.count[rows] >= 2 + spare]
        return rows, _uniform(self.count[rows] - spare, generator)


def _uniform(below: Rows, generator: torch.Generator) -> Rows:
    """A whole number from 0 to below each bound."""
    drawn = torch.rand(len(below), generator=generator).to(below.device)
    return torch.minimum((drawn * below).long(), below - 1)


def _choose(
    candidates: Bool[Tensor, "row rollout"], generator: torch.Generator
) -> tuple[Bool[Tensor, " row"], Int[Tensor, " _"]]:
    """Which rows have a candidate at all, and one candidate, drawn evenly, for each of those."""
    drawn = torch.rand(candidates.shape, generator=generator).to(candidates.device)
    found = candidates.any(1)
    return found, torch.where(candidates, drawn, -1.0)[found].max(1).indices


def _other_groups(rollouts: Rollouts, rows: Rows) -> Bool[Tensor, "row rollout"]:
    return rollouts.group[rows][:, None] != rollouts.group


def _successes(rollouts: Rollouts, count: int, generator: torch.Generator) -> Rows:
    """One success of each of up to `count` groups, drawn evenly."""
    drawn = torch.randperm(len(rollouts), generator=generator).to(rollouts.group.device)
    drawn = drawn[rollouts.rewards[drawn] == 1]
    group = rollouts.group[drawn]
    # The first of its group in the order drawn.
    earlier = (group[:, None] == group).tril(-1).any(1)
    return drawn[~earlier][:count]


def _groups_of(rollouts: Rollouts, rows: Rows) -> Int[Tensor, " _"]:
    """Every rollout of the groups of the given ones."""
    return torch.isin(rollouts.group, rollouts.group[rows]).nonzero()[:, 0]

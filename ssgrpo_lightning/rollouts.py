"""Problems to grouped rollouts: sample, verify, cut into steps, pad. Knows no Lightning."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from operator import attrgetter

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.engines import RolloutEngine, Samples, Sampling
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.functional import step_lengths
from ssgrpo_lightning.judge import Judge as Judge
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import PER_TOKEN, Problem, Rollouts, Verdict

# Any number of row numbers; parts of a split differ in length.
Rows = Int[Tensor, " _"]
# Replicas of re-rollouts count from here, so that no rollout of `collect` has the same noise.
RESAMPLED = 1 << 31


def collect(
    policy: Policy,
    engine: RolloutEngine,
    judge: Judge,
    problems: Sequence[Problem],
    group_size: int,
    sampling: Sampling,
    seed: int,
    policy_step: int,
    replica: int = 0,
) -> Rollouts:
    """Sample a group of rollouts per problem, verify them and cut them into steps.

    The noise of a rollout depends on (seed, policy_step, problem, replica) alone; a problem that
    stands twice in the batch makes two groups with noise of their own. Replicas count from
    `replica`, so that another call in the same update can draw others.
    """
    prompts = [policy.codec.encode(p) for p in problems]
    keys, seen = [], dict.fromkeys((p.id for p in problems), replica)
    for problem in problems:
        first = seen[problem.id]
        keys += [(seed, policy_step, problem.id, first + k) for k in range(group_size)]
        seen[problem.id] += group_size
    noise = uniform_noise(keys, sampling.max_new_tokens)
    owners = [problem for problem in problems for _ in range(group_size)]
    parts, ids, texts, pending = [], [], [], []
    for part in engine.stream(policy, prompts, group_size, sampling, noise):
        new = [t[:n] for t, n in zip(part.tokens.tolist(), part.lengths.tolist())]
        said = [policy.codec.decode(i) for i in new]
        # Verifiers that have workers are busy with these while the next part is sampled.
        pending.append(judge.begin(said, owners[len(ids) : len(ids) + len(new)]))
        parts, ids, texts = [*parts, part], ids + new, texts + said
    return assemble(
        prompts=[prompt for prompt in prompts for _ in range(group_size)],
        samples=Samples.join(parts),
        steps=[judge.steps(policy.codec.pieces(i)) for i in ids],
        verdicts=[verdict for verdicts in pending for verdict in verdicts()],
        group=[g for g in range(len(problems)) for _ in range(group_size)],
        problems=owners,
        texts=texts,
        pad_id=policy.codec.pad_id,
        policy_step=policy_step,
        temperature=sampling.temperature or 1.0,
    )


def assemble(
    prompts: Sequence[Sequence[int]],
    samples: Samples,
    steps: Sequence[Sequence[int]],
    verdicts: Sequence[Verdict],
    group: Sequence[int],
    problems: Sequence[Problem],
    texts: Sequence[str],
    pad_id: int,
    policy_step: int,
    temperature: float = 1.0,
) -> Rollouts:
    """Lay prompts and completions side by side: prompts end, completions begin in one column."""
    device, new = samples.tokens.device, samples.tokens.shape[1]
    left = max((len(p) for p in prompts), default=0)
    prompt = torch.tensor([[pad_id] * (left - len(p)) + list(p) for p in prompts], device=device)
    given = torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts], device=device)
    sampled = torch.arange(new, device=device) < samples.lengths[:, None]
    step = torch.tensor([[*s, *[-1] * (new - len(s))] for s in steps], device=device)
    blank = torch.zeros(prompt.shape, device=device)
    rewards = [float("nan") if v.reward is None else v.reward for v in verdicts]
    return Rollouts(
        tokens=torch.cat([prompt, torch.where(sampled, samples.tokens, pad_id)], 1),
        attended=torch.cat([given.bool(), sampled], 1),
        sampled=torch.cat([blank.bool(), sampled], 1),
        step=torch.cat([blank.long() - 1, step], 1),
        logprobs=torch.cat([blank, samples.logprobs.float() * sampled], 1),
        entropy=torch.cat([blank, samples.entropy.float() * sampled], 1),
        rewards=torch.tensor(rewards, dtype=torch.float32, device=device),
        truncated=samples.truncated,
        group=torch.tensor(group, dtype=torch.long, device=device),
        problems=tuple(problems),
        texts=tuple(texts),
        verdicts=tuple(verdicts),
        policy_step=policy_step,
        parts=_parts([v.parts for v in verdicts], device),
        temperature=temperature,
    )


def _parts(
    parts: Sequence[tuple[float | None, ...]], device: torch.device
) -> Float[Tensor, "rollout part"] | None:
    """Partial rewards as a table, NaN where there is none; None where no reward has parts."""
    width, nan = max(map(len, parts), default=0), float("nan")
    if not width:
        return None
    rows = [[nan if x is None else x for x in row] + [nan] * (width - len(row)) for row in parts]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Rollouts of one update one after the other; groups are numbered on from part to part."""
    starts = [_prompt_width(part) for part in parts]
    left = max(starts)
    right = max(part.tokens.shape[1] - start for part, start in zip(parts, starts))
    width = max(0 if part.parts is None else part.parts.shape[1] for part in parts)
    if width:  # where no verdict was reached at all, none had parts
        nan = float("nan")
        parts = [
            replace(p, parts=p.rewards.new_full((len(p), width), nan)) if p.parts is None else p
            for p in parts
        ]
    joined, groups = {}, 0
    for f in fields(Rollouts):
        values = [getattr(part, f.name) for part in parts]
        if f.name in PER_TOKEN and values[0] is not None:
            blank = -1 if f.name == "step" else 0
            sides = [(left - s, right - (v.shape[1] - s)) for v, s in zip(values, starts)]
            values = [pad(v, side, value=blank) for v, side in zip(values, sides)]
        if isinstance(values[0], Tensor):
            joined[f.name] = torch.cat(values)
        elif isinstance(values[0], tuple):
            joined[f.name] = sum(values, ())
    offset = []
    for part in parts:
        offset.append(part.group + groups)
        groups += int(part.group.max()) + 1
    return replace(parts[0], **{**joined, "group": torch.cat(offset)})


def _prompt_width(rollouts: Rollouts) -> int:
    """Columns up to the end of the prompts, which all end in one column."""
    return int((rollouts.attended & ~rollouts.sampled).any(0).nonzero()[-1]) + 1


@dataclass(frozen=True)
class Prefix:
    """A completion as far as it has got; prefixes of one problem with the same tokens are equal."""

    problem: Problem = field(hash=False)
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    temperature: float = 1.0
    """That it was sampled at, and is continued at."""


def step_prefixes(rollouts: Rollouts, before: Bool[Tensor, "rollout step"]) -> list[Prefix]:
    """What stood there before each marked step, in the order of ``before.nonzero()``."""
    lengths = step_lengths(rollouts.step, rollouts.steps)
    starts = (lengths.cumsum(1) - lengths).tolist()
    given = rollouts.attended & ~rollouts.sampled
    prompts = [tuple(t[m].tolist()) for t, m in zip(rollouts.tokens, given)]
    completions = [tuple(t[m].tolist()) for t, m in zip(rollouts.tokens, rollouts.sampled)]
    return [
        Prefix(
            rollouts.problems[row],
            prompts[row],
            completions[row][: starts[row][step]],
            rollouts.temperature,
        )
        for row, step in before.nonzero().tolist()
    ]


@dataclass
class Resampler:
    """Continues completions from prefixes as they were sampled, and says how well they end.

    The noise of a re-rollout depends on (seed, policy_step, problem, tokens of the prefix, repeat)
    alone, so the order of prefixes and what they are batched with change nothing; prefixes of one
    problem and length share it, which takes noise out of their difference.
    """

    policy: Policy
    """What continues them, as it is at the time of the call."""
    engine: RolloutEngine
    """What samples."""
    judge: Judge
    """Verifies the whole text, prefix included."""
    sampling: Sampling
    """How they are drawn, but for the temperature, which a prefix brings along; the token budget
    is that of the whole completion."""
    seed: int = 0
    """Seed of the noise."""
    at_once: int = 64
    """Prefixes that go to the engine together, of one temperature and like length."""
    calls: int = field(default=0, init=False)
    """Re-rollouts sampled so far."""
    tokens: int = field(default=0, init=False)
    """Tokens of them that were used, without those of the prefixes."""

    def __call__(
        self, prefixes: Sequence[Prefix], repeats: int, policy_step: int
    ) -> Float[Tensor, " prefix"]:
        """Mean reward of `repeats` re-rollouts of every prefix; equal ones are re-rolled once.

        Re-rollouts without a verdict leave the mean; NaN where none has one.

        Args:
            prefixes: Must not have ended.
            repeats: Re-rollouts of each, below 4096.
            policy_step: Policy updates made so far.
        """
        distinct = sorted(dict.fromkeys(prefixes), key=lambda p: (p.temperature, len(p.completion)))
        pending = []  # verdicts on one part are reached while the next is sampled
        for temperature, alike in groupby(distinct, attrgetter("temperature")):
            together = list(alike)
            for start in range(0, len(together), self.at_once):
                part = together[start : start + self.at_once]
                pending.append(self._sample(part, repeats, policy_step, temperature))
        rewards = [
            float("nan") if verdict.reward is None else verdict.reward
            for verdicts in pending
            for verdict in verdicts()
        ]
        means = dict(zip(distinct, torch.tensor(rewards).view(-1, repeats).nanmean(1).tolist()))
        return torch.tensor([means[prefix] for prefix in prefixes])

    def _sample(
        self, part: Sequence[Prefix], repeats: int, policy_step: int, temperature: float
    ) -> Callable[[], list[Verdict]]:
        # All may grow by what the shortest may, and are then cut to what they may themselves:
        # tokens do not depend on later ones, so each is what its own budget would have given.
        room = [max(self.sampling.max_new_tokens - len(p.completion), 0) for p in part]
        budget = max(*room, 1)
        sampling = replace(self.sampling, max_new_tokens=budget, temperature=temperature)
        keys = [
            (self.seed, policy_step, p.problem.id, RESAMPLED | len(p.completion) << 12 | k)
            for p in part
            for k in range(repeats)
        ]
        noise = uniform_noise(keys, sampling.max_new_tokens)
        prompts = [[*p.prompt, *p.completion] for p in part]
        samples = self.engine.generate(self.policy, prompts, repeats, sampling, noise)
        texts = []
        for i, (ids, length) in enumerate(zip(samples.tokens.tolist(), samples.lengths.tolist())):
            used = min(length, room[i // repeats])
            texts.append(self.policy.codec.decode([*part[i // repeats].completion, *ids[:used]]))
            self.tokens += used
        self.calls += len(texts)
        return self.judge.begin(texts, [p.problem for p in part for _ in range(repeats)])


def minibatches(
    group: Int[Tensor, " rollout"], groups: int, count: int, generator: torch.Generator
) -> list[Rows]:
    """Rows of each optimiser step of a pass: whole groups, in random order if there are several.

    Args:
        group: Group of each rollout of this rank.
        groups: Groups of all ranks, which split them alike.
        count: Optimiser steps.
        generator: Randomness of the order, the same on every rank.
    """
    if count == 1:
        return [torch.arange(len(group), device=group.device)]
    parts = torch.randperm(groups, generator=generator).to(group.device).tensor_split(count)
    return [torch.isin(group, part).nonzero()[:, 0] for part in parts if len(part)]


def whole_groups(rollouts: Rollouts, groups: int) -> Iterator[Rows]:
    """Rows in portions of whole groups, `groups` of them at a time."""
    for members in rollouts.group.unique().split(groups) if len(rollouts) else ():
        yield torch.isin(rollouts.group, members).nonzero()[:, 0]


def step_texts(rollouts: Rollouts, policy: Policy, row: int) -> list[str]:
    """Text of every step of one rollout, for people."""
    mask = rollouts.sampled[row]
    pieces = policy.codec.pieces(rollouts.tokens[row][mask].tolist())
    texts = [""] * (int(rollouts.step[row].max()) + 1)
    for piece, step in zip(pieces, rollouts.step[row][mask].tolist()):
        texts[step] += piece
    return texts


def step_labels(
    rollouts: Rollouts, policy: Policy, label: Callable[[Problem, Sequence[str]], list[bool]]
) -> Bool[Tensor, "rollout step"]:
    """A task's own label of every step; False where there is none."""
    labels = torch.zeros(len(rollouts), rollouts.steps, dtype=torch.bool)
    for row, problem in enumerate(rollouts.problems):
        found = label(problem, step_texts(rollouts, policy, row))
        labels[row, : len(found)] = torch.tensor(found, dtype=torch.bool)
    return labels

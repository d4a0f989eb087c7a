"""The records that travel through one update.

Axes, the same words in every signature of the package:

- ``rollout``  rollouts of one batch; the rollouts of a group are neighbours
- ``token``    position in the padded sequence: padding, prompt, completion, padding
- ``step``     reasoning step of a rollout, padded to the most steps of any rollout in the batch

One alignment everywhere: entry ``t`` of a per-token tensor describes token ``t``. The shift by one
between a token and the logits that predict it exists inside `policy` and nowhere else. Masks come
from lengths, never from token values: id 0 is a real token in many vocabularies, and the padding
token may be the end-of-sequence token.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssgrpo_lightning.problems import Message as Message
from ssgrpo_lightning.problems import Problem as Problem
from ssgrpo_lightning.problems import Verdict as Verdict

PER_TOKEN = {"tokens", "attended", "sampled", "step", "logprobs", "entropy", "reference"}


@dataclass(frozen=True)
class Rollouts:
    """Grouped rollouts of one update, with everything known about them before learning.

    Attributes:
        tokens: Token ids: prompt padded on the left, completion padded on the right.
        attended: True on everything but padding.
        sampled: True where the policy chose the token: the only place a policy loss may apply.
        step: Step index of each sampled token, counting from 0; -1 elsewhere.
        logprobs: Log-probability in nats of each sampled token under the policy and temperature
            that sampled it; 0 elsewhere.
        entropy: Entropy in nats of the distribution each sampled token was drawn from; 0 elsewhere.
        rewards: Outcome reward of each rollout; NaN where the verifier gave None.
        truncated: True where the token budget ended the rollout.
        group: Group of each rollout, counting from 0. Groups are told by this, never by text: the
            same prompt twice is two groups.
        problems: Problem of each rollout.
        texts: Completion text of each rollout, without special tokens.
        verdicts: What the verifier said about each rollout.
        policy_step: Number of policy updates made before these rollouts were sampled.
        penalties: What is taken off each reward before advantages are made, for length or KL;
            None: nothing; NaN: the rollout has no return. Estimators learn the reward, which stays
            an outcome in [0, 1].
        parts: Rewards that each reward was made of, NaN where a part has no verdict; None: of one.
        masked: True where a rollout leaves the policy loss, its divisor included; None: nowhere.
        temperature: What divided the logits when these were sampled; 1 for greedy ones.
        reference: Log-probability of each sampled token under the reference that a KL holds the
            policy to; 0 elsewhere; None without one.
    """

    tokens: Int[Tensor, "rollout token"]
    attended: Bool[Tensor, "rollout token"]
    sampled: Bool[Tensor, "rollout token"]
    step: Int[Tensor, "rollout token"]
    logprobs: Float[Tensor, "rollout token"]
    entropy: Float[Tensor, "rollout token"]
    rewards: Float[Tensor, " rollout"]
    truncated: Bool[Tensor, " rollout"]
    group: Int[Tensor, " rollout"]
    problems: tuple[Problem, ...]
    texts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    policy_step: int = 0
    penalties: Float[Tensor, " rollout"] | None = None
    parts: Float[Tensor, "rollout part"] | None = None
    masked: Bool[Tensor, " rollout"] | None = None
    temperature: float = 1.0
    reference: Float[Tensor, "rollout token"] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def returns(self) -> Float[Tensor, " rollout"]:
        """What advantages are made of: the reward less the penalties."""
        return self.rewards if self.penalties is None else self.rewards - self.penalties

    @property
    def steps(self) -> int:
        """Most steps of any rollout in the batch, at least 1: the size of the ``step`` axis."""
        return int(self.step.max().item()) + 1 if bool(self.sampled.any()) else 1

    @property
    def reasons(self) -> tuple[str, ...]:
        """The verifier's reason for each reward, for people."""
        return tuple(verdict.reason for verdict in self.verdicts)

    @property
    def completion_lengths(self) -> Int[Tensor, " rollout"]:
        """Sampled tokens of each rollout."""
        return self.sampled.sum(1)

    def with_prompt_step(self) -> "Rollouts":
        """The same rollouts with the prompt as step 0, as if it had been sampled too.

        What reads one number per step then reads one of the prompt in front of the others.
        """
        step = torch.where(self.attended, self.step + 1, -1)
        return replace(self, sampled=self.attended, step=step)

    def to(self, device: torch.device | str) -> "Rollouts":
        """The same rollouts with every tensor on `device`."""
        moved = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def columns(self, rows: Int[Tensor, " row"]) -> slice:
        """The columns in which any of the given rollouts has a token."""
        used = self.attended[rows].any(0).nonzero()
        return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)

    def select(self, rows: Int[Tensor, " row"]) -> "Rollouts":
        """The given rollouts, in the given order, without the columns that only padded others.

        `rows` counts rollouts from 0. Groups keep their numbers.
        """
        picked, span, changed = rows.tolist(), self.columns(rows), {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = value[rows, span] if f.name in PER_TOKEN else value[rows]
            elif isinstance(value, tuple):
                changed[f.name] = tuple(value[i] for i in picked)
        return replace(self, **changed)


@dataclass(frozen=True)
class Outcomes:
    """What an advantage may look at: how each rollout of a batch ended, over all ranks.

    One record, so that no signature has to change for the next idea.

    Attributes:
        returns: Reward of each rollout less its penalties; NaN without a verdict.
        rewards: Outcome reward of each rollout in [0, 1]; NaN without a verdict.
        group: Group of each rollout.
        copies: How often the completion of each rollout stands in its group, at least 1.
        parts: Rewards that each reward was made of; None: of one.
    """

    returns: Float[Tensor, " rollout"]
    rewards: Float[Tensor, " rollout"]
    group: Int[Tensor, " rollout"]
    copies: Int[Tensor, " rollout"]
    parts: Float[Tensor, "rollout part"] | None = None

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True)
class CreditedRollouts:
    """Rollouts with all that the policy loss needs.

    Attributes:
        rollouts: The rollouts.
        advantages: Advantage of each sampled token; 0 elsewhere.
        old: Log-probability of each sampled token before the first optimiser step of the update;
            None where that is the very forward pass of the loss, so that the ratio is exactly 1.
    """

    rollouts: Rollouts
    advantages: Float[Tensor, "rollout token"]
    old: Float[Tensor, "rollout token"] | None = None

    def select(self, rows: Int[Tensor, " row"]) -> "CreditedRollouts":
        """The given rollouts, cut like `Rollouts.select`."""
        span = self.rollouts.columns(rows)
        old = None if self.old is None else self.old[rows, span]
        return CreditedRollouts(self.rollouts.select(rows), self.advantages[rows, span], old)


@dataclass(frozen=True)
class StepScores:
    """What a credit rule or an objective may look at.

    One record, so that no signature has to change for the next idea.

    Attributes:
        scores: Soundness of each step in [0, 1], as the estimator sees it.
        values: Value of the prefix that ends with each step: expected reward from there.
        mask: True where the rollout has that step.
        lengths: Tokens of each step; 0 where there is none.
        rewards: Outcome reward of each rollout; NaN without a verdict.
        baseline: Value before the first step: mean reward of the rollout's group, kept off 0 and 1
            by half a rollout, or the estimator's own value of the prompt, where it has one.
        advantages: Group advantage of each rollout; 0 without a verdict.
        group: Group of each rollout.
        policy_step: Number of policy updates made before; what rules that draw are seeded with.
        calls: Judgements that scoring took: steps checked, or re-rollouts.
    """

    scores: Float[Tensor, "rollout step"]
    values: Float[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    lengths: Int[Tensor, "rollout step"]
    rewards: Float[Tensor, " rollout"]
    baseline: Float[Tensor, " rollout"]
    advantages: Float[Tensor, " rollout"]
    group: Int[Tensor, " rollout"]
    policy_step: int = 0
    calls: int = 0

    def select(self, rows: Int[Tensor, " row"], steps: int) -> "StepScores":
        """The given rollouts and their first `steps` steps."""
        changed = {
            f.name: value[rows] if value.ndim == 1 else value[rows, :steps]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class ScoredRollouts:
    """Rollouts with the scores they had when they came in: what the estimator learns from.

    Attributes:
        rollouts: The rollouts.
        scores: Their outcomes, and how the estimator read them before it learnt from them.
    """

    rollouts: Rollouts
    scores: StepScores

    def select(self, rows: Int[Tensor, " row"]) -> "ScoredRollouts":
        """The given rollouts, cut like `Rollouts.select`."""
        rollouts = self.rollouts.select(rows)
        return ScoredRollouts(rollouts, self.scores.select(rows, rollouts.steps))

"""Estimators: tiny networks that read a rollout and give every step a logit.

One abstract class, then its members.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ssgrpo_lightning.functional import (
    evidence_logit,
    group_evidence,
    others_mean,
    pool_steps,
    prefix_fingerprints,
    step_fingerprints,
    step_lengths,
)
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import Resampler


class Estimator(nn.Module, ABC):
    """A step-value estimator; what its logits mean is the objective's business."""

    sees_outcome: ClassVar[bool] = False
    """Whether the reward of a rollout enters the logits of its own steps."""
    by_identity: ClassVar[bool] = False
    """Whether all that counts of a step is which others of its group are equal to it."""
    reads_policy: ClassVar[bool] = False
    """Whether scoring takes passes of the policy."""
    calls: int = 0
    """What has been bought so far: re-rollouts, or steps checked; 0 for those that ask nobody."""

    def load(self) -> None:
        """Load pretrained weights, once the config has been checked; most have none."""

    def bind(self, policy: Policy, resample: Resampler) -> None:
        """Called once the policy has loaded, before the first rollouts are scored.

        Most need neither. The policy must not become a submodule here: it has an optimiser and a
        place in the checkpoint of its own.

        Args:
            policy: The policy that samples the rollouts, as it is at any time.
            resample: Continues completions from prefixes as the run samples them.
        """

    @abstractmethod
    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        """One logit per step. Entries of steps that do not exist are finite and ignored."""

    def idle(self) -> Tensor:
        """0, by way of every weight that learns: a pass of a rank that has nothing to learn."""
        learning = [p for p in self.parameters() if p.requires_grad]
        return torch.stack([0 * p.sum() for p in learning]).sum()


class SharedState(Estimator):
    """Share of successes among the other rollouts of the group that pass through the same prefix.

    A prefix tree of the group, as TEMPO (2509.18314). One number is learnt: how far such a share is
    drawn to that of all the others, so that evidence that does not predict outcomes loses its
    say and credit becomes plain GRPO's. Nothing of the policy's confidence enters: credit for it
    makes a policy surer of what it does anyway. Long free text shares short prefixes only. Use it
    with the objective `LeaveOneOut`.

    Args:
        prior: Rollouts at the mean of all the others that are counted beside those through the
            prefix, to start from.
    """

    by_identity: ClassVar[bool] = True

    def __init__(self, prior: float = 1.0) -> None:
        super().__init__()
        if prior <= 0:
            raise ValueError(
                f"SharedState.prior is {prior}, must be greater than 0: a prefix that no other "
                "rollout shares has nothing else to go by"
            )
        self.log_prior = nn.Parameter(torch.tensor(prior).log())

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        key = prefix_fingerprints(rollouts.tokens, rollouts.step, rollouts.steps)
        return others_logit(rollouts, key, self.log_prior.exp())


class CausalSteps(Estimator):
    """One causal pass over [prompt; step 1; step 2; …], each read from its prefix only.

    A step enters as one vector: its tokens, embedded with their offset in the step and pooled,
    plus the policy's own log-probabilities and entropies of them. Attention runs over steps, not
    tokens, so that a pass costs little beside the policy's. A step's confidence also reaches its
    logit directly, and the rest of the network starts at zero: untrained, the estimator doubts the
    steps whose least likely token the policy itself found unlikely.

    Args:
        hidden: Width of the network.
        layers: Transformer layers.
        heads: Attention heads.
        vocabulary_buckets: Rows of the embedding table; token ids are taken modulo this, so that
            the network does not grow with the policy's vocabulary.
    """

    CONFIDENCE = 5

    def __init__(
        self, hidden: int = 128, layers: int = 2, heads: int = 4, vocabulary_buckets: int = 4096
    ) -> None:
        super().__init__()
        _check_width("CausalSteps", hidden, heads)
        self.buckets = vocabulary_buckets
        self.embedding = nn.Embedding(vocabulary_buckets, hidden)
        self.mix = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU())
        self.confidence = nn.Linear(self.CONFIDENCE, hidden)
        self.encoder = _encoder(hidden, layers, heads)
        self.read_out = nn.Linear(hidden, 1)
        self.direct = nn.Linear(self.CONFIDENCE, 1)
        for layer in (self.read_out, self.direct):
            nn.init.zeros_(layer.weight)
        with torch.no_grad():
            self.direct.weight[0, 1] = 1.0
            self.direct.bias.fill_(2.0)
            self.read_out.bias.zero_()

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        confidence = step_confidence(rollouts)
        text = self._pooled_text(rollouts, confidence.shape[1])
        # Segment 0 is the prompt, which the policy did not sample: it has no confidence.
        own = nn.functional.pad(self.confidence(confidence), (0, 0, 1, 0))
        segments = text + own + _sinusoid(torch.arange(text.shape[1], device=text.device), text)
        causal = nn.Transformer.generate_square_subsequent_mask(
            segments.shape[1], device=segments.device, dtype=segments.dtype
        )
        read = self.encoder(segments, mask=causal, is_causal=True)[:, 1:]
        return (self.read_out(read) + self.direct(confidence))[..., 0]

    def _pooled_text(self, rollouts: Rollouts, steps: int) -> Float[Tensor, "rollout segment h"]:
        """Mean over the tokens of the prompt (segment 0) and of each step."""
        attended, count = rollouts.attended, steps + 1
        row = torch.arange(len(rollouts), device=attended.device)[:, None]
        segment = (row * count + rollouts.step + 1)[attended]
        offset = _offsets(segment, len(rollouts) * count)
        embedded = self.embedding(rollouts.tokens[attended] % self.buckets)
        vectors = self.mix(embedded + _sinusoid(offset, embedded))
        sums = vectors.new_zeros(len(rollouts) * count, vectors.shape[1])
        sums = sums.index_add(0, segment, vectors)
        sizes = segment.bincount(minlength=len(sums)).clamp(min=1)
        return (sums / sizes[:, None]).view(len(rollouts), count, vectors.shape[1])


class GroupConfidence(Estimator):
    """The policy's own doubt, corrected by what the same step led to in the rest of the group.

    Three numbers are learnt: how a step's least log-probability turns into confidence (two, with
    a slope that cannot turn negative), and how far the group's evidence is doubted. A step that
    stands in successes of the group is acquitted, however unlikely the policy found it: filler,
    decoys and bold but right steps. Reads the outcomes of the *other* rollouts of a group only.

    Args:
        bias: Logit of a step that the policy was certain of, to start from.
        slope: Fall of the logit per nat of its least likely token, to start from.
        doubt: Failures that are counted against every step's evidence, to start from.
    """

    def __init__(self, bias: float = 2.0, slope: float = 2.0, doubt: float = 1.0) -> None:
        super().__init__()
        for name, value in (("slope", slope), ("doubt", doubt)):
            if value <= 0:
                raise ValueError(f"GroupConfidence.{name} is {value}, must be greater than 0")
        self.bias = nn.Parameter(torch.tensor(bias))
        self.log_slope = nn.Parameter(torch.tensor(slope).log())
        self.log_doubt = nn.Parameter(torch.tensor(doubt).log())

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        step, steps = rollouts.step, rollouts.steps
        least = pool_steps(rollouts.logprobs.clamp(min=-20), step, steps, "amin")
        key = step_fingerprints(rollouts.tokens, step, steps)
        mask = step_lengths(step, steps) > 0
        won, lost = group_evidence(key, mask, rollouts.rewards, rollouts.group)
        confidence = self.bias + self.log_slope.exp() * least
        return evidence_logit(confidence, won, lost, self.log_doubt.exp())


class PublishedEncoder(Estimator):
    """The published recipe: every step alone, encoded with its prompt, without positions.

    Sees neither what came before nor the order of tokens, and encodes the prompt once per step;
    kept as it was specified, as a baseline.

    Args:
        hidden: Width of the network.
        layers: Transformer layers.
        heads: Attention heads.
        vocabulary_buckets: Rows of the embedding table; token ids are taken modulo this.
    """

    def __init__(
        self, hidden: int = 128, layers: int = 2, heads: int = 4, vocabulary_buckets: int = 4096
    ) -> None:
        super().__init__()
        _check_width("PublishedEncoder", hidden, heads)
        self.buckets = vocabulary_buckets
        self.embedding = nn.Embedding(vocabulary_buckets, hidden)
        self.encoder = _encoder(hidden, layers, heads)
        self.read_out = nn.Linear(hidden, 1)

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        row, step, tokens, real, own = _prompt_and_step(rollouts)
        encoded = self.encoder(self.embedding(tokens % self.buckets), src_key_padding_mask=~real)
        pooled = (encoded * own[..., None]).sum(1) / own.sum(1, keepdim=True).clamp(min=1)
        logits = encoded.new_zeros(len(rollouts), rollouts.steps)
        return logits.index_put((row, step), self.read_out(pooled)[:, 0])


def others_logit(
    rollouts: Rollouts, key: Int[Tensor, "rollout step"], prior: Float[Tensor, ""]
) -> Float[Tensor, "rollout step"]:
    """Logit of the share of successes among the other rollouts of the group with the same key.

    Drawn to the share among all the others by `prior` more rollouts.
    """
    mask = step_lengths(rollouts.step, rollouts.steps) > 0
    won, lost = group_evidence(key, mask, rollouts.rewards, rollouts.group)
    expected = others_mean(rollouts.rewards, rollouts.group)[:, None]
    return torch.logit((won + prior * expected) / (won + lost + prior))


def step_confidence(rollouts: Rollouts) -> Float[Tensor, "rollout step feature"]:
    """What the policy thought of each step, in nats.

    Mean, least and summed log-probability of its tokens, mean and greatest entropy; sums are kept
    above -20.
    """
    step, steps = rollouts.step, rollouts.steps
    logprobs, entropy = rollouts.logprobs.clamp(min=-20), rollouts.entropy
    return torch.stack(
        [
            pool_steps(logprobs, step, steps, "mean"),
            pool_steps(logprobs, step, steps, "amin"),
            pool_steps(logprobs, step, steps, "sum").clamp(min=-20),
            pool_steps(entropy, step, steps, "mean"),
            pool_steps(entropy, step, steps, "amax"),
        ],
        -1,
    )


def _check_width(name: str, hidden: int, heads: int) -> None:
    if heads < 1 or hidden % (2 * heads):
        raise ValueError(
            f"{name}.hidden is {hidden} with {heads} heads, must be a multiple of twice the heads: "
            f"use {max(1, round(hidden / (2 * max(heads, 1)))) * 2 * max(heads, 1)}"
        )


def _encoder(hidden: int, layers: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(hidden), enable_nested_tensor=False)


def _sinusoid(position: Int[Tensor, " n"], like: Tensor) -> Float[Tensor, "n h"]:
    """Sinusoidal encoding of positions (Attention Is All You Need, 1706.03762, section 3.5)."""
    width = like.shape[-1]
    rate = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000.0) / width))
    angle = position[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(like.dtype)


def _offsets(segment: Int[Tensor, " n"], count: int) -> Int[Tensor, " n"]:
    """Position of each entry within its segment; entries of a segment stand together.

    >>> _offsets(torch.tensor([4, 4, 0, 0, 0]), 5)
    tensor([0, 1, 0, 1, 2])
    """
    index = torch.arange(len(segment), device=segment.device)
    first = index.new_full((count,), len(segment)).scatter_reduce(0, segment, index, "amin")
    return index - first[segment]


def _prompt_and_step(
    rollouts: Rollouts,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every step of every rollout as a row of its own: the prompt, then the step.

    Returns:
        Rollout and step of each row, its tokens padded on the right, which of them are real, and
        which belong to the step.
    """
    device = rollouts.tokens.device
    prompt = rollouts.attended & ~rollouts.sampled
    width = rollouts.tokens.shape[1]
    position = torch.arange(width, device=device).expand_as(rollouts.tokens)
    # One sort brings each row's prompt tokens, then its steps in order, to the front.
    lengths = nn.functional.one_hot(rollouts.step + 1, rollouts.steps + 1).sum(1)[:, 1:]
    row, step = (lengths > 0).nonzero(as_tuple=True)
    first = torch.where(rollouts.sampled, position, width).amin(1)
    start = first[:, None] + lengths.cumsum(1) - lengths
    prompt_length = prompt.sum(1)
    prompt_start = torch.where(prompt, position, width).amin(1).clamp(max=width - 1)
    own_length, own_start = lengths[row, step], start[row, step]
    total = prompt_length[row] + own_length
    column = torch.arange(int(total.max()) if len(total) else 0, device=device)[None]
    in_prompt = column < prompt_length[row, None]
    source = torch.where(
        in_prompt,
        prompt_start[row, None] + column,
        own_start[:, None] + column - prompt_length[row, None],
    ).clamp(max=width - 1)
    real = column < total[:, None]
    return row, step, rollouts.tokens[row[:, None], source], real, real & ~in_prompt

"""Rollouts on transformers, by a lean decode loop over one key-value cache."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from ssgrpo_lightning.engines.cache import ReservedLayer, reserved_cache
from ssgrpo_lightning.engines.engine import RolloutEngine, Samples, Sampling
from ssgrpo_lightning.engines.stopping import StopStrings
from ssgrpo_lightning.layout import SHARED_ATTENTION
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.sharding import whole

# Renamed between the releases of transformers that we support.
_CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(inspect.unwrap(LlamaModel.forward)).parameters
    else "past_key_values"
)


@dataclass(frozen=True)
class TransformersEngine(RolloutEngine):
    """Computes what the completions of a group share once, and drops what has ended.

    A prompt is prefilled once for its whole group, and completions go on as one row of the batch
    for as long as they say the same. Token in, token out: nothing is re-tokenised, and the
    log-probabilities of the drawn tokens come with them.
    """

    rows_at_once: int = 512
    """Most completions decoded together; bounds the memory of the key-value cache."""

    def __post_init__(self) -> None:
        if self.rows_at_once < 1:
            raise ValueError(
                f"TransformersEngine.rows_at_once is {self.rows_at_once}, must be at least 1: "
                "256 is usual"
            )

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Samples:
        return Samples.join(list(self.stream(policy, prompts, repeats, sampling, noise)))

    def stream(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Iterator[Samples]:
        at_once = max(1, self.rows_at_once // repeats)
        with whole(policy):
            for start in range(0, len(prompts), at_once):
                chunk = prompts[start : start + at_once]
                rows = slice(start * repeats, (start + len(chunk)) * repeats)
                # Inference mode spares every small operation its bookkeeping.
                with _evaluating(policy), torch.inference_mode():
                    part = _Decode(policy, chunk, repeats, sampling, noise[rows]).run()
                # …but its tensors may not meet autograd: what leaves is a copy made outside.
                yield Samples(**{f.name: getattr(part, f.name).clone() for f in fields(Samples)})


@contextmanager
def _evaluating(policy: Policy) -> Iterator[None]:
    """The model as it decodes best: no dropout, and on a CPU the attention fast for single tokens.

    Training mode would also forbid a cache under gradient checkpointing.
    """
    training, model = policy.training, policy.model
    attention = model.config._attn_implementation
    swap = model.device.type == "cpu" and attention in ("sdpa", SHARED_ATTENTION)
    policy.eval()
    if swap:
        model.set_attn_implementation(GROUPED_ATTENTION)
    try:
        yield
    finally:
        policy.train(training)
        if swap:
            model.set_attn_implementation(attention)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as two batched matrix products over the heads that share a key and value head.

    For one query token per row on a CPU about twice as fast as the fused kernel, which is built
    for long queries. Longer queries (the prefill) go to that kernel.
    """
    rows, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    shared = query.reshape(rows, key.shape[1], -1, width) * (scaling or width**-0.5)
    scores = shared @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores += attention_mask
    output = scores.softmax(-1) @ value
    return output.reshape(rows, heads, 1, -1).transpose(1, 2), None


GROUPED_ATTENTION = "ssgrpo_grouped"
AttentionInterface.register(GROUPED_ATTENTION, _grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, eager_mask)


class _Decode:
    """One batch of completions while it grows.

    Completions that began with the same prompt and have said the same so far are one *branch*: one
    row of the cache, one row of the forward pass. A branch splits where its completions draw
    different tokens, and its row is given away when all of them have ended.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Tensor,
    ) -> None:
        self.policy, self.sampling = policy, sampling
        self.device = policy.model.device
        rows, new = len(prompts) * repeats, sampling.max_new_tokens
        self.noise = noise.to(self.device)
        self.eos = torch.tensor(sorted(policy.eos_ids), device=self.device, dtype=torch.long)
        self.warpers = warpers(sampling)
        self.stops = StopStrings(policy.codec, sampling.stop) if sampling.stop else None
        self.tokens = torch.full((rows, new), policy.codec.pad_id, device=self.device)
        self.lengths = torch.full((rows,), new, device=self.device)
        self.logprobs = torch.zeros(rows, new, device=self.device)
        self.entropy = torch.zeros(rows, new, device=self.device)
        self.truncated = torch.ones(rows, dtype=torch.bool, device=self.device)
        # Completions that have not ended, the branch of each, and the prompt of each branch.
        self.rows = torch.arange(rows, device=self.device)
        self.prompt = torch.arange(len(prompts), device=self.device)
        self.branch = self.prompt.repeat_interleave(repeats)
        self._prefill(prompts)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width, new = int(lengths.max()), self.sampling.max_new_tokens
        padded = [[self.policy.codec.pad_id] * (width - len(p)) + list(p) for p in prompts]
        attended = torch.arange(width, device=self.device) >= width - lengths[:, None]
        self.cache = reserved_cache(self.policy.model.config, len(self.rows), width + new)
        self.position, self.width = lengths, width
        # Without padding there is nothing to mask, and attention takes its fast path.
        self.attended = None
        if not bool(attended.all()):
            self.attended = torch.cat([attended, attended.new_ones(len(prompts), new)], 1)
        self.logits = self._forward(
            torch.tensor(padded, device=self.device),
            None if self.attended is None else attended.long(),
            (attended.long().cumsum(1) - 1).clamp(min=0),
        )

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Logits of the last token of every branch."""
        hidden = self.policy.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{_CACHE_ARGUMENT: self.cache},
        ).last_hidden_state
        return self.policy.head(hidden[:, -1])

    def run(self) -> Samples:
        """Decode until every completion has ended or the budget is spent."""
        for t in range(self.sampling.max_new_tokens):
            chosen = self._draw(t)
            if not len(chosen) or t + 1 == self.sampling.max_new_tokens:
                break
            tokens = self._split(chosen)
            self.width += 1
            positions = self.position[self.prompt, None] + t
            self.logits = self._forward(tokens[:, None], self._mask(), positions)
        return Samples(self.tokens, self.lengths, self.logprobs, self.entropy, self.truncated)

    def _draw(self, t: int) -> Tensor:
        """Draw and write down token `t` of every running completion; returns those of the rest."""
        logits = self.warpers(self.tokens, self.logits.float())  # pyright: ignore[reportArgumentType]
        logprobs = logits.log_softmax(-1)
        probabilities = logprobs.exp()
        if self.sampling.temperature == 0:
            chosen = logits.argmax(-1)[self.branch]
        else:
            chosen = _invert(probabilities, self.branch, self.noise[self.rows, t])
        self.tokens[self.rows, t] = chosen
        self.logprobs[self.rows, t] = logprobs[self.branch, chosen]
        self.entropy[self.rows, t] = torch.special.entr(probabilities).sum(-1)[self.branch]
        ends = torch.isin(chosen, self.eos)
        if self.stops is not None and len(self.rows):
            ends |= self.stops.said(self.tokens[self.rows, : t + 1])
        if bool(ends.any()):
            ended, goes_on = self.rows[ends], ~ends
            self.lengths[ended] = t + 1
            self.truncated[ended] = False
            self.rows, self.branch = self.rows[goes_on], self.branch[goes_on]
            chosen = chosen[goes_on]
        return chosen

    def _split(self, chosen: Tensor) -> Tensor:
        """Give every different continuation a row of its own; returns the next token of each row.

        The first continuation of a branch stays in its row, the others take rows that nothing
        reads any more, so that the rows stay the first ones and few of them move.
        """
        vocabulary = self.logits.shape[1]
        keys, member = (self.branch * vocabulary + chosen).unique(return_inverse=True)
        parent, count = keys // vocabulary, len(keys)
        first = torch.ones_like(parent, dtype=torch.bool)
        first[1:] = parent[1:] != parent[:-1]
        stays = first & (parent < count)
        free = torch.ones(count, dtype=torch.bool, device=self.device)
        free[parent[stays]] = False
        row = parent.clone()
        row[~stays] = free.nonzero()[:, 0]
        source = torch.empty_like(row)
        source[row] = parent
        if len(self.prompt) != count or bool((~stays).any()):
            self.cache.batch_select_indices(source)
            self.prompt = self.prompt[source]
        self.branch = row[member]
        tokens = torch.empty_like(row)
        tokens[row] = keys % vocabulary
        return tokens

    def _mask(self) -> Tensor | None:
        """What the next token of every branch attends to; None for everything."""
        if self.attended is None:
            return None
        attended = self.attended[self.prompt, : self.width]
        if all(isinstance(layer, ReservedLayer) for layer in self.cache.layers):
            # In the form in which attention adds it: transformers then has nothing to build.
            least = torch.finfo(self.logits.dtype).min
            return torch.where(attended, 0.0, least).to(self.logits.dtype)[:, None, None]
        return attended.long()


def _invert(probabilities: Tensor, branch: Tensor, noise: Tensor) -> Tensor:
    """Draw one token for each number of `noise` from its branch, by the inverse distribution.

    The distributions of all branches stand one after the other in one growing sequence, so that
    none has to be copied for each of its completions.
    """
    count, vocabulary = probabilities.shape
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    offset = torch.arange(count, device=branch.device, dtype=torch.float64)[:, None]
    line = (cumulative / cumulative[:, -1:] + offset).flatten()
    found = torch.searchsorted(line, branch + noise, right=True)
    return (found - branch * vocabulary).clamp(0, vocabulary - 1)


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """The logits processors of transformers, in the order in which ``generate`` applies them."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers

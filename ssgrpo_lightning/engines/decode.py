"""Rollouts on transformers, by a lean decode loop over one key-value cache."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from transformers.masking_utils import sdpa_mask

from ssgrpo_lightning.engines.cache import reserved_cache
from ssgrpo_lightning.engines.engine import RolloutEngine, Samples, Sampling
from ssgrpo_lightning.policy import Policy

# Renamed between the releases of transformers that we support.
_CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(inspect.unwrap(LlamaModel.forward)).parameters
    else "past_key_values"
)


@dataclass(frozen=True)
class TransformersEngine(RolloutEngine):
    """Prefills every distinct prompt once, repeats its cache over the group, drops finished rows.

    Token in, token out: nothing is re-tokenised, and the log-probabilities of the drawn tokens
    come with them.
    """

    rows_at_once: int = 512
    """Most completions decoded together; bounds the memory of the key-value cache."""
    drop_share: float = 0.1
    """Share of finished rows at which they leave the cache; moving the others has its price."""

    def __post_init__(self) -> None:
        if self.rows_at_once < 1:
            raise ValueError(
                f"TransformersEngine.rows_at_once is {self.rows_at_once}, must be at least 1"
            )
        if not 0 < self.drop_share <= 1:
            raise ValueError(
                f"TransformersEngine.drop_share is {self.drop_share}, must be in (0, 1]"
            )

    @torch.no_grad()
    def generate(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Samples:
        at_once = max(1, self.rows_at_once // repeats)
        parts = []
        with _evaluating(policy):
            for start in range(0, len(prompts), at_once):
                chunk = prompts[start : start + at_once]
                rows = slice(start * repeats, (start + len(chunk)) * repeats)
                parts.append(_Decode(policy, chunk, repeats, sampling, noise[rows], self).run())
        joined = {
            f: torch.cat([getattr(p, f) for p in parts]) for f in Samples.__dataclass_fields__
        }
        used = int(joined["lengths"].max())
        return Samples(**{f: x[:, :used] if x.ndim == 2 else x for f, x in joined.items()})


@contextmanager
def _evaluating(policy: Policy) -> Iterator[None]:
    """The model as it decodes best: no dropout, and on a CPU the attention fast for single tokens.

    Training mode would also forbid a cache under gradient checkpointing.
    """
    training, model = policy.training, policy.model
    attention = model.config._attn_implementation
    swap = model.device.type == "cpu" and attention == "sdpa"
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
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    output = scores.softmax(-1) @ value
    return output.reshape(rows, heads, 1, -1).transpose(1, 2), None


GROUPED_ATTENTION = "ssgrpo_grouped"
AttentionInterface.register(GROUPED_ATTENTION, _grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


class _Decode:
    """One batch of completions while it grows; rows leave when they end."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Tensor,
        engine: TransformersEngine,
    ) -> None:
        self.policy, self.sampling, self.engine = policy, sampling, engine
        self.device = policy.model.device
        rows, new = len(prompts) * repeats, sampling.max_new_tokens
        self.noise = noise.to(self.device)
        self.eos = torch.tensor(sorted(policy.eos_ids), device=self.device, dtype=torch.long)
        self.warpers = _warpers(sampling)
        self.rows = torch.arange(rows, device=self.device)
        self.tokens = torch.full((rows, new), policy.codec.pad_id, device=self.device)
        self.lengths = torch.full((rows,), new, device=self.device)
        self.logprobs = torch.zeros(rows, new, device=self.device)
        self.entropy = torch.zeros(rows, new, device=self.device)
        self.truncated = torch.ones(rows, dtype=torch.bool, device=self.device)
        self._prefill(prompts, repeats)

    def _prefill(self, prompts: Sequence[Sequence[int]], repeats: int) -> None:
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width = int(lengths.max())
        padded = [[self.policy.codec.pad_id] * (width - len(p)) + list(p) for p in prompts]
        tokens = torch.tensor(padded, device=self.device)
        attended = torch.arange(width, device=self.device) >= width - lengths[:, None]
        self.cache = reserved_cache(self.policy.model.config, width + self.sampling.max_new_tokens)
        self.padded = bool((lengths < width).any())
        hidden = self._forward(tokens, attended, (attended.long().cumsum(1) - 1).clamp(min=0))
        self.logits = self.policy.head(hidden[:, -1]).repeat_interleave(repeats, 0)
        self.cache.batch_repeat_interleave(repeats)
        self.position = lengths.repeat_interleave(repeats)
        # The mask of the whole decode at once: a step sees a prefix of its columns.
        budget = attended.new_ones(len(self.rows), self.sampling.max_new_tokens)
        self.attended = torch.cat([attended.repeat_interleave(repeats, 0), budget], 1)
        self.width = width

    def _forward(self, tokens: Tensor, attended: Tensor, positions: Tensor) -> Tensor:
        # Without padding there is nothing to mask, and attention takes its fast path.
        return self.policy.model.base_model(
            input_ids=tokens,
            attention_mask=attended.long() if self.padded else None,
            position_ids=positions,
            use_cache=True,
            **{_CACHE_ARGUMENT: self.cache},
        ).last_hidden_state

    def run(self) -> Samples:
        """Decode until every row has ended or the budget is spent."""
        for t in range(self.sampling.max_new_tokens):
            chosen, ended = self._draw(t)
            if bool(ended.all()) or t + 1 == self.sampling.max_new_tokens:
                break
            chosen = self._drop(chosen, ended)
            self.width += 1
            attended = self.attended[:, : self.width]
            hidden = self._forward(chosen[:, None], attended, self.position[:, None])
            self.logits = self.policy.head(hidden[:, -1])
            self.position = self.position + 1
        return Samples(self.tokens, self.lengths, self.logprobs, self.entropy, self.truncated)

    def _draw(self, t: int) -> tuple[Tensor, Tensor]:
        """Draw token `t` of every row still in the cache, and write it down for those not ended."""
        logits = self.warpers(self.tokens, self.logits.float())  # pyright: ignore[reportArgumentType]
        logprobs = logits.log_softmax(-1)
        probabilities = logprobs.exp()
        if self.sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            # Inverse of the cumulative distribution: one uniform number decides a token.
            cumulative = probabilities.double().cumsum(-1)
            point = self.noise[self.rows, t, None] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, point, right=True)[:, 0]
            chosen = chosen.clamp(max=logits.shape[-1] - 1)
        running = self.truncated[self.rows]
        rows, picked = self.rows[running], chosen[running, None]
        self.tokens[rows, t] = picked[:, 0]
        self.logprobs[rows, t] = logprobs[running].gather(1, picked)[:, 0]
        self.entropy[rows, t] = torch.special.entr(probabilities[running]).sum(-1)
        ends = torch.isin(chosen, self.eos) & running
        self.lengths[self.rows[ends]] = t + 1
        self.truncated[self.rows[ends]] = False
        return chosen, ~self.truncated[self.rows]

    def _drop(self, chosen: Tensor, ended: Tensor) -> Tensor:
        """Take ended rows out of the cache once there are enough of them."""
        if int(ended.sum()) < self.engine.drop_share * len(ended):
            return chosen
        keep = (~ended).nonzero()[:, 0]
        self.cache.batch_select_indices(keep)
        self.rows, self.position = self.rows[keep], self.position[keep]
        self.attended = self.attended[keep]
        return chosen[keep]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """The logits processors of transformers, in the order in which ``generate`` applies them."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers

"""The swap point: how the tokens of a micro-batch are laid out for one pass of the decoder.

Every layout gives the same hidden states, and so the same loss and gradient; they differ in what
is computed twice, or for padding. What stands after a token never changes its hidden state, so
rows are moved to the left and need no mask: attention takes its causal fast path.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ssgrpo_lightning.records import Rollouts

Rows = Int[Tensor, " _"]
Tokens = Int[Tensor, "rollout token"]
Mask = Bool[Tensor, "rollout token"]
Hidden = Float[Tensor, "sampled hidden"]


class Layout(ABC):
    """How the tokens of a micro-batch are laid out for one pass of the decoder."""

    shares_prompts: ClassVar[bool] = False
    """Whether rollouts of a group cost less together."""

    def check(self, attention: str) -> None:
        """Refuse an attention implementation that cannot read this layout.

        Raises:
            ValueError: It cannot.
        """
        return

    def prepare(self, model: Any) -> None:
        """Set a transformers causal language model up for this layout."""
        return

    @abstractmethod
    def order(self, rollouts: Rollouts, rows: Rows) -> Rows:
        """The rows, with those that go well together side by side."""

    @abstractmethod
    def tokens(self, rollouts: Rollouts, rows: Rows) -> int:
        """Tokens that a pass over these rows computes, padding included."""

    @abstractmethod
    def hidden(self, model: Any, tokens: Tokens, attended: Mask, sampled: Mask) -> Hidden:
        """Last hidden state before every sampled token, in the order of ``sampled.nonzero()``.

        Args:
            model: The layers of a transformers model below its head.
            tokens: Token ids, padded anywhere.
            attended: True on everything but padding.
            sampled: True on the tokens to predict: the last of each rollout, never its first.
        """


@dataclass(frozen=True)
class Padded(Layout):
    """One row per rollout, padded to the longest: rollouts of like length go together."""

    def order(self, rollouts: Rollouts, rows: Rows) -> Rows:
        return rows[rollouts.attended[rows].sum(1).argsort(stable=True)]

    def tokens(self, rollouts: Rollouts, rows: Rows) -> int:
        return len(rows) * int(rollouts.attended[rows].sum(1).max())

    def hidden(self, model: Any, tokens: Tokens, attended: Mask, sampled: Mask) -> Hidden:
        tokens, attended, sampled = _left(attended, tokens, attended, sampled)
        # Nothing is predicted from the last token.
        states = decode(model, tokens[:, :-1])
        return states[sampled[:, 1:]]


@dataclass(frozen=True)
class Packed(Layout):
    """All rollouts one after the other in a single row, told apart by their positions.

    With ``attention: flash_attention_2`` no padding is computed anywhere. Other attention gets a
    mask of all pairs of tokens of the micro-batch: keep ``micro_batch`` small, or use `Padded`.
    """

    def order(self, rollouts: Rollouts, rows: Rows) -> Rows:
        return rows

    def tokens(self, rollouts: Rollouts, rows: Rows) -> int:
        return int(rollouts.attended[rows].sum())

    def hidden(self, model: Any, tokens: Tokens, attended: Mask, sampled: Mask) -> Hidden:
        position = (attended.long().cumsum(1) - 1)[attended]
        states = decode(model, tokens[attended][None], position[None])[0]
        return states[:-1][sampled[attended][1:]]


@dataclass(frozen=True)
class SharedPrompt(Layout):
    """Every prompt once, and every completion once, in a single row without padding.

    Only attention sees rollouts: keys and values of a prompt are handed to all of its completions.
    Same gradient as `Padded`, since a prompt's hidden states do not depend on what follows.
    """

    shares_prompts: ClassVar[bool] = True

    def check(self, attention: str) -> None:
        if attention not in ("sdpa", SHARED_ATTENTION):
            raise ValueError(
                f"policy.layout is SharedPrompt and policy.model.attention is {attention!r}, must "
                "be 'sdpa': change it, or set the layout to Padded or Packed"
            )

    def prepare(self, model: Any) -> None:
        self.check(model.config._attn_implementation)
        model.set_attn_implementation(SHARED_ATTENTION)

    def order(self, rollouts: Rollouts, rows: Rows) -> Rows:
        lengths, group = rollouts.attended[rows].sum(1), rollouts.group[rows]
        longest = lengths.new_zeros(len(rollouts)).scatter_reduce(0, group, lengths, "amax")
        return rows[longest[group].argsort(stable=True)]

    def tokens(self, rollouts: Rollouts, rows: Rows) -> int:
        part = rollouts.select(rows)
        return int(
            _Plan.of(*_left(part.attended, part.tokens, part.attended, part.sampled)).kept.sum()
        )

    def hidden(self, model: Any, tokens: Tokens, attended: Mask, sampled: Mask) -> Hidden:
        tokens, attended, sampled = _left(attended, tokens, attended, sampled)
        plan = _Plan.of(tokens, attended, sampled)
        column = torch.arange(plan.kept.shape[1], device=tokens.device).expand_as(plan.kept)
        states = decode(model, tokens[:, :-1][plan.kept][None], column[plan.kept][None], plan)[0]
        return states[plan.place[sampled[:, 1:]]]


@dataclass(frozen=True)
class _Plan:
    """Where the tokens of a rollout stand in the packed row.

    Attributes:
        place: For every token of every rollout its place in the row; anything on padding.
        kept: True on the one token of the rollouts that stands for each place, in order.
    """

    place: Int[Tensor, "rollout token"]
    kept: Bool[Tensor, "rollout token"]

    @classmethod
    def of(cls, tokens: Tensor, attended: Tensor, sampled: Tensor) -> "_Plan":
        """Of rows that begin in column 0; nothing is predicted from the last token of a row."""
        given = attended & ~sampled
        width = int(given.sum(1).max())
        prompts = torch.where(given, tokens, -1)[:, :width]
        _, group = prompts.unique(dim=0, return_inverse=True)
        row = torch.arange(len(tokens), device=tokens.device)
        first = row.new_full((len(tokens),), len(tokens)).scatter_reduce(0, group, row, "amin")
        owner = first[group]
        given, goes_on = given[:, :-1], sampled[:, 1:] & sampled[:, :-1]
        kept = (given & (owner == row)[:, None]) | goes_on
        place = (kept.flatten().cumsum(0) - 1).clamp(min=0).view_as(kept)
        return cls(torch.where(given, place[owner], place), kept)


def _shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: _Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, rollout by rollout; without a plan that of rows as they are."""
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    shape, flat = plan.place.shape, plan.place.flatten()

    def spread(x: Tensor) -> Tensor:
        rows = x[0].transpose(0, 1).flatten(1).index_select(0, flat)
        return rows.view(*shape, x.shape[1], x.shape[3]).transpose(1, 2)

    window = kwargs.get("sliding_window") or shape[1]
    if window < shape[1]:
        raise ValueError(
            f"the model's attention sees {window} tokens back and rollouts have {shape[1]}, which "
            "policy.layout SharedPrompt does not know: set the layout to Padded"
        )
    kwargs.pop("is_causal", None)
    output, _ = sdpa_attention_forward(
        module, spread(query), spread(key), spread(value), None, is_causal=True, **kwargs
    )
    return output[plan.kept][None], None


SHARED_ATTENTION = "ssgrpo_shared_prompt"
AttentionInterface.register(SHARED_ATTENTION, _shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


def micro_batches(
    rollouts: Rollouts, rows: Rows, layout: Layout, size: int, tokens: int | None = None
) -> list[Rows]:
    """Split rows into micro-batches of rollouts that go well together.

    Args:
        rollouts: All rollouts.
        rows: Those to split.
        layout: Says what goes well together, and what a pass over it computes.
        size: Most rollouts of one.
        tokens: Most tokens of one, padding included; a rollout above it goes alone. None: any.
    """
    rows = layout.order(rollouts, rows)
    if tokens is None:
        return [part for part in rows.split(size) if len(part)]
    parts = []
    while len(rows):
        counts = range(1, min(size, len(rows)) + 1)
        fits = bisect_right(counts, tokens, key=lambda n: layout.tokens(rollouts, rows[:n]))
        parts.append(rows[: max(fits, 1)])
        rows = rows[max(fits, 1) :]
    return parts


def decode(
    model: Any, tokens: Tokens, positions: Tokens | None = None, plan: _Plan | None = None
) -> Float[Tensor, "rollout token hidden"]:
    """Last hidden state of every token, each seeing those before it in its row.

    Args:
        model: The layers of a transformers model below its head.
        tokens: Token ids of rows that begin in column 0.
        positions: Place of each token in its rollout; None where it is the column.
        plan: How rollouts share the row; only for `SharedPrompt`.
    """
    arguments: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    if plan is not None:
        # A mask of four axes is taken as it is, and so none of all pairs is built.
        arguments |= {"plan": plan, "attention_mask": tokens.new_empty(1, 1, 0, 0)}
    return model(input_ids=tokens, use_cache=False, **arguments).last_hidden_state


def hidden_states(
    model: Any, tokens: Tokens, attended: Mask
) -> Float[Tensor, "rollout token hidden"]:
    """Last hidden state of every token, and anything finite on padding.

    Args:
        model: The layers of a transformers model below its head.
        tokens: Token ids, padded anywhere.
        attended: True on everything but padding.
    """
    (moved,) = _left(attended, tokens)
    states = decode(model, moved)
    column = (attended.long().cumsum(1) - 1).clamp(min=0)
    return states.gather(1, column[..., None].expand(-1, -1, states.shape[2]))


def _left(attended: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors of tokens with the padding of every row moved behind it, to the longest row."""
    order = (~attended).long().argsort(dim=1, stable=True)[:, : int(attended.sum(1).max())]
    return [x.gather(1, order) for x in tensors]

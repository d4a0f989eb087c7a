"""A key-value cache that writes into memory reserved once."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """A cache layer of fixed capacity that is filled in place.

    The stock layer grows by concatenation, which copies the whole cache for every token: most of
    the time of a small model. Rearranging its rows copies only those that move.

    Args:
        rows: Most rows at any time.
        capacity: Most tokens of a row.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.most_rows, self.capacity = rows, capacity
        self.used = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.key_room, self.value_room = self._reserve(key_states), self._reserve(value_states)
        span, rows = slice(self.used, self.used + key_states.shape[2]), len(key_states)
        self.key_room[:rows, :, span] = key_states
        self.value_room[:rows, :, span] = value_states
        self.used = span.stop
        return self._show(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let row i become what row ``indices[i]`` was.

        A row that another reads must stay what it is.
        """
        moved = (indices != torch.arange(len(indices), device=indices.device)).nonzero()[:, 0]
        if len(moved):
            for room in (self.key_room, self.value_room):
                room[moved, :, : self.used] = room[indices[moved], :, : self.used]
        self._show(len(indices))

    def _reserve(self, like: Tensor) -> Tensor:
        return like.new_empty(self.most_rows, like.shape[1], self.capacity, like.shape[3])

    def _show(self, rows: int) -> tuple[Tensor, Tensor]:
        """The used part, where the base class keeps it too."""
        keys = self.keys = self.key_room[:rows, :, : self.used]
        values = self.values = self.value_room[:rows, :, : self.used]
        return keys, values


def reserved_cache(config: Any, rows: int, capacity: int) -> DynamicCache:
    """A cache of a model's own kinds of layers, the plain ones with their memory reserved.

    Args:
        config: Config of the model.
        rows: Most rows at any time.
        capacity: Most tokens of a row, prompt and completion.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(rows, capacity) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache

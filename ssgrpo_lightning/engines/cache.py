"""A key-value cache that writes into memory reserved once."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """A cache layer of fixed capacity that is filled in place.

    The stock layer grows by concatenation, which copies the whole cache for every token: most of
    the time of a small model.

    Args:
        capacity: Most tokens of a row.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._reserve(key_states, value_states, len(key_states))
        span = slice(self.used, self.used + key_states.shape[2])
        self.key_room[:, :, span] = key_states
        self.value_room[:, :, span] = value_states
        self.used = span.stop
        return self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        keys, values = self._show()
        self._reserve(keys, values, len(keys) * repeats)
        self._fill(keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        keys, values = self._show()
        keys, values = keys[indices], values[indices]
        self.key_room, self.value_room = self.key_room[: len(keys)], self.value_room[: len(keys)]
        self._fill(keys, values)

    def _reserve(self, keys: Tensor, values: Tensor, rows: int) -> None:
        self.key_room = keys.new_empty(rows, keys.shape[1], self.capacity, keys.shape[3])
        self.value_room = values.new_empty(rows, values.shape[1], self.capacity, values.shape[3])

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        for room, content in zip(self._show(), (keys, values), strict=True):
            room.copy_(content)

    def _show(self) -> tuple[Tensor, Tensor]:
        """The used part, where the base class keeps it too."""
        keys = self.keys = self.key_room[:, :, : self.used]
        values = self.values = self.value_room[:, :, : self.used]
        return keys, values


def reserved_cache(config: Any, capacity: int) -> DynamicCache:
    """A cache of a model's own kinds of layers, the plain ones with their memory reserved.

    Args:
        config: Config of the model.
        capacity: Most tokens of a row, prompt and completion.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache

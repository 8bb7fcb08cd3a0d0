"""Keys and values that grow token by token without being copied each time.

Shapes: C tokens so far, n new tokens, D head dim.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class GrowingStates:
    """States [1, heads, C, D] in memory that doubles when it is full, so that few are ever moved.

    Args:
        like: states of the same heads, head dim, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self._held = like[:, :, :0]

    def put(self, start: int, states: Tensor) -> Tensor:
        """Write states [1, heads, n, D] behind the first `start`, over what is there. Returns all up to their end."""
        end = start + states.shape[2]
        if end > self._held.shape[2]:
            shape = list(self._held.shape)
            shape[2] = 2 * end
            larger = self._held.new_empty(shape)
            larger[:, :, :start] = self._held[:, :, :start]
            self._held = larger
        self._held[:, :, start:end] = states
        return self._held[:, :, :end]


class GrowingLayer(DynamicLayer):
    """One full-attention layer of transformers' `DynamicCache`, which would copy its whole context for each token."""

    _layer_type = None  # it takes nobody's place in transformers' own table

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states [1, heads, n, D]. Returns all keys and values."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._grown = GrowingStates(key_states), GrowingStates(value_states)
        length = self.get_seq_length()  # less than was put where `crop` has cut
        self.keys, self.values = self._grown[0].put(length, key_states), self._grown[1].put(length, value_states)
        return self.keys, self.values

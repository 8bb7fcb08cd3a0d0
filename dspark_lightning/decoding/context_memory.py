"""What a draft remembers of the context while it decodes: the keys and values of each of its layers.

Shapes: K block size, n new context tokens, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_lightning.attention import attend_with_sinks
from dspark_lightning.decoding.growing import GrowingStates


class ContextMemory:
    """`BlockAttention` of one block over all context so far, of which each call brings only what is new.

    A draft's layers project the context they are given; so they are given the new tokens alone, and the keys and values
    come here, layer after layer. Nothing has to be forgotten: only what the target accepted becomes context.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[GrowingStates, GrowingStates]] = []
        self._next = self._start = self._end = 0  # layer, and the length of the context before and with this block

    def next_block(self) -> None:
        """The next call comes from the first layer again."""
        self._next, self._start = 0, self._end

    def __call__(
        self,
        query: Tensor,  # [1, heads, K, D]
        key: Tensor,  # [1, kv_heads, K, D]
        value: Tensor,
        context_key: Tensor,  # [1, kv_heads, n, D]
        context_value: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns [1, heads, K, Dv]; see `BlockAttention`."""
        del dropout  # nothing is trained here
        if self._next == len(self._layers):
            self._layers.append((GrowingStates(context_key), GrowingStates(context_value)))
        all_keys, all_values = self._layers[self._next]
        self._next, self._end = self._next + 1, self._start + context_key.shape[2]
        all_keys.put(self._start, context_key)
        all_values.put(self._start, context_value)
        # The block stands behind the context until the next context overwrites it.
        keys, values = all_keys.put(self._end, key), all_values.put(self._end, value)
        if sinks is not None:
            visible = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
            return attend_with_sinks(query, keys, values, visible, sinks, scale, dropout=0.0)
        grouped = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=grouped)

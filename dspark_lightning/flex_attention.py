"""Block attention on CUDA: FlexAttention, which skips whole tiles that no query sees.

All blocks of the batch are one query sequence, all contexts and blocks one key sequence; the mask keeps them apart.
Shapes: B samples, C context length, M blocks, K block size, D head dim.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from dspark_lightning.blocks import Blocks

MAX_HEAD_DIM = 256
"""Its kernels keep a tile of a head in shared memory, which wider heads overflow."""


@cache
def _compiled(function: Any) -> Any:
    """Compile once for all shapes: the number of blocks changes from batch to batch."""
    return torch.compile(function, dynamic=True)


class FlexBlockAttention:
    """`BlockAttention` through FlexAttention.

    Args:
        blocks: on the device of the queries.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        # On the CPU, where FlexAttention has no backward pass, it runs uncompiled: for tests only.
        on_cuda = blocks.rows.device.type == "cuda"
        self.attend = _compiled(flex_attention) if on_cuda else flex_attention
        self.build_mask = _compiled(create_block_mask) if on_cuda else create_block_mask
        self._mask: BlockMask | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `BlockAttention`.

        Raises:
            ValueError: dropout is not 0.
        """
        if dropout:
            raise ValueError(f"attention 'flex' has no dropout, got attention_dropout {dropout}: use 'dense'")
        if self._mask is None:  # the same for all layers
            self._mask = self._block_mask(query.shape[2])
        attended = self.attend(
            _sequence(query),
            torch.cat([_sequence(context_key), _sequence(key)], dim=2),
            torch.cat([_sequence(context_value), _sequence(value)], dim=2),
            block_mask=self._mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is not None:  # a column without a value only makes the others smaller
            attended, aux = attended
            share = torch.sigmoid(aux.lse - sinks.float().unsqueeze(-1))  # [1, heads, M*K]
            attended = attended * share.unsqueeze(-1).to(attended.dtype)
        blocks = attended.squeeze(0).unflatten(1, (-1, query.shape[2]))  # [heads, M, K, D]
        return cast(Tensor, blocks.transpose(0, 1))

    def _block_mask(self, block_size: int) -> BlockMask:
        blocks = self.blocks
        context_tokens = blocks.grid[0] * blocks.context_length
        first = blocks.rows * blocks.context_length + blocks.starts  # [M], in the sequence of all contexts
        end = blocks.rows * blocks.context_length + blocks.anchors
        real = None if blocks.context_mask is None else blocks.context_mask.flatten()

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del batch, head
            block = query // block_size
            in_context = (key >= first[block]) & (key < end[block])  # ends before the block tokens begin
            if real is not None:
                in_context = in_context & real[key.clamp(max=context_tokens - 1)]
            own = (key >= context_tokens) & ((key - context_tokens) // block_size == block)
            return in_context | own

        queries = blocks.rows.shape[0] * block_size
        keys = context_tokens + queries
        return cast(BlockMask, self.build_mask(visible, None, None, queries, keys, device=blocks.rows.device))


def _sequence(values: Tensor) -> Tensor:
    """Join all rows or blocks: from [X, heads, L, D] to [1, heads, X*L, D]."""
    return values.transpose(0, 1).flatten(1, 2).unsqueeze(0)

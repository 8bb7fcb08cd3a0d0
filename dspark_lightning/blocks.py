"""The blocks of a batch as a list: dummies are left out, so they cost neither attention nor projections.

Everything here is index arithmetic on the anchors. Anchors that lie on the CPU keep it there: listing the blocks then
never waits for an accelerator.
Shapes: B samples, S sequence length, N anchors a row, K block size, M listed blocks, C context length.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """M blocks, row by row, and the stretch of context that each of them sees."""

    index: Tensor  # int64 [M], place among the B*N anchors
    rows: Tensor  # int64 [M], row of the batch, ascending
    starts: Tensor  # int64 [M], first context position seen: 0, or the start of the anchor's document
    anchors: Tensor  # int64 [M], the context ends before it; equal to the start for a dummy
    context_mask: Tensor | None  # bool [B, C], False = never visible; None when every position that is reached is real
    context_length: int  # C: no block looks further
    grid: tuple[int, int]  # (B, N)

    def to(self, device: torch.device) -> "Blocks":
        """The same blocks on another device; a copy from the CPU is not waited for."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def scatter(self, values: Tensor) -> Tensor:
        """Put values [M, ...], on the device of the blocks, in their places [B, N, ...]; zeros elsewhere."""
        batch_size, num_anchors = self.grid
        full = values.new_zeros(batch_size * num_anchors, *values.shape[1:])
        return full.index_copy(0, self.index, values).view(*self.grid, *values.shape[1:])

    def gather(self, values: Tensor) -> Tensor:
        """Take the values [M, ...] of the blocks out of [B, N, ...]."""
        return values.flatten(0, 1).index_select(0, self.index)


def list_blocks(
    seq_len: int,
    anchor_positions: Tensor,  # [B, N]
    block_keep_mask: Tensor,  # [B, N]
    seq_lens: Tensor | None = None,  # [B, D], packed rows
    attention_mask: Tensor | None = None,  # [B, S], 0 = never visible as context
    trim: bool = True,
) -> Blocks:
    """List the kept blocks of a batch, on the device of `anchor_positions`.

    A batch without any keeps one dummy, so that every parameter of the draft takes part in every step.

    Args:
        seq_len: S.
        anchor_positions: positions of the anchors.
        block_keep_mask: False marks dummies.
        seq_lens: document lengths of packed rows, zero padded.
        attention_mask: 0 = never visible as context.
        trim: whether the context ends with the last anchor; otherwise C = S.
    """
    device = anchor_positions.device
    index = block_keep_mask.flatten().nonzero().squeeze(-1)
    anchors = anchor_positions.flatten()[index]
    if not index.numel():
        index = anchors = torch.zeros(1, dtype=torch.int64, device=device)
    rows = index // anchor_positions.shape[1]
    starts = torch.zeros_like(anchors)
    if seq_lens is not None:
        ends = seq_lens.to(device).cumsum(dim=-1)[rows]  # [M, D]
        starts = torch.where(ends <= anchors.unsqueeze(-1), ends, 0).amax(dim=-1)
    length = int(anchors.max()) + 1 if trim else seq_len
    mask = None
    if attention_mask is not None:
        mask = attention_mask.to(device)[:, :length].bool()
        behind = torch.zeros(mask.shape[0], dtype=torch.int64, device=device)
        behind = behind.scatter_reduce(0, rows, anchors, "amax")  # a row's padding lies behind its last anchor
        if bool((mask | (torch.arange(length, device=device) >= behind.unsqueeze(-1))).all()):
            mask = None
    return Blocks(index, rows, starts, anchors, mask, length, (anchor_positions.shape[0], anchor_positions.shape[1]))

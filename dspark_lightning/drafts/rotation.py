"""The two ways in which RoPE pairs channels.

Both rotate pair (a, b) to (a cos - b sin, b cos + a sin); they differ in which channels make a pair.
Shapes: X rows or blocks, L tokens, D head dim, R rotated channels.
"""

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]
"""cos and sin of the angles, [X, L, .]."""


def rotate_halves(states: Tensor, rope: Rope) -> Tensor:
    """Pairs (i, i + R/2) of the LEADING channels of [X, heads, L, D]; the tables are [X, L, R], their halves alike."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return turned if width == states.shape[-1] else torch.cat([turned, rest], dim=-1)


def rotate_neighbours(states: Tensor, rope: Rope) -> Tensor:
    """Pairs (2i, 2i + 1) of the TRAILING channels of [X, heads, L, D]; the tables are [X, L, R/2], one entry a pair."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    still = states.shape[-1] - 2 * cos.shape[-1]
    rest, turned = states[..., :still], states[..., still:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([rest, turned], dim=-1) if still else turned

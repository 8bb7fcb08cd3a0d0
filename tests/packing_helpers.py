"""Documents and packs of them for the tests of packing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helpers import seeded


def documents(*lengths: int, first_row_id: int = 0) -> list[dict[str, Tensor]]:
    """Items of a row set: random ids below 97 that are not special, two thirds of them supervised."""
    with seeded(sum(lengths)):
        return [
            {
                "input_ids": torch.randint(6, 97, (length,)),
                "loss_mask": (torch.arange(length) % 9 > 2).long(),
                "row_id": torch.tensor(first_row_id + i),
            }
            for i, length in enumerate(lengths)
        ]


def grid(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Anchors of each row as a draft takes them."""
    width = max(map(len, rows))
    return {
        "anchor_positions": torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]),
        "block_keep_mask": torch.tensor([[i < len(row) for i in range(width)] for row in rows]),
    }

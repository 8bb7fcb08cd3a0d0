"""Rows to one batch of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_MULTIPLE = 8  # lengths in steps of 8 suit tensor cores and keep the number of different shapes small


def collate_rows(rows: Sequence[dict[str, Tensor]], pad_token_id: int, max_length: int) -> dict[str, Tensor]:
    """Pad rows on the right, to the longest of them rounded up to a multiple of 8, but not above max_length.

    Args:
        rows: Each with `input_ids` and `loss_mask` [tokens], at most max_length, and `row_id` []; `loss_weights`
            [tokens] in all of them or in none.
        pad_token_id: Fills `input_ids`; attention_mask, loss_mask and loss_weights are 0 there.
        max_length: Upper limit of S.

    Returns:
        `input_ids`, `attention_mask`, `loss_mask` [B, S] and `row_id` [B], all int64; `loss_weights` [B, S], float32,
        where the rows have them. Nothing is shifted.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    size = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, max_length)

    def pad(name: str, value: int) -> Tensor:
        padded = pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        return torch.nn.functional.pad(padded, (0, size - padded.shape[1]), value=value)

    return {
        "input_ids": pad("input_ids", pad_token_id),
        "attention_mask": (torch.arange(size) < lengths[:, None]).long(),
        **{name: pad(name, 0) for name in ("loss_mask", "loss_weights") if name in rows[0]},
        "row_id": torch.stack([row["row_id"] for row in rows]),
    }

"""Rows to one batch of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_MULTIPLE = 8  # lengths in steps of 8 suit tensor cores and keep the number of different shapes small
_PER_DOCUMENT = {"seq_lens": 0, "doc_row_ids": -1}  # of packed rows, and what stands where a row has fewer documents


def collate_rows(rows: Sequence[dict[str, Tensor]], pad_token_id: int, max_length: int) -> dict[str, Tensor]:
    """Pad rows on the right, to the longest of them rounded up to a multiple of 8, but not above max_length.

    Args:
        rows: Each with `input_ids` and `loss_mask` [tokens], at most max_length, `row_id` [], and what else there is
            for each token; packed rows also with what `join_documents` adds. Where some have `loss_weights`, those
            of the others are 1.
        pad_token_id: Fills `input_ids`; attention_mask and whatever else there is for each token are 0 there.
        max_length: Upper limit of S.

    Returns:
        `input_ids`, `attention_mask`, `loss_mask` [B, S] and `row_id` [B], all int64, and the others in their own
        dtype. Nothing is shifted. In packed rows the padding is a document of its own for the target: its position_ids
        restart. It counts in neither `seq_lens` [B, M] nor `doc_row_ids` [B, M], for M documents at most.
    """
    if any("loss_weights" in row for row in rows):
        rows = [{"loss_weights": torch.ones(len(row["input_ids"])), **row} for row in rows]
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    size = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, max_length)
    behind = torch.arange(size) - lengths[:, None]  # 0, 1, ... in the padding, negative before it

    def pad(name: str) -> Tensor:
        values = [row[name] for row in rows]
        if values[0].dim() == 0:
            return torch.stack(values)
        if name in _PER_DOCUMENT:
            return pad_sequence(values, batch_first=True, padding_value=_PER_DOCUMENT[name])
        fill = pad_token_id if name == "input_ids" else 0
        padded = pad_sequence(values, batch_first=True, padding_value=fill)
        padded = torch.nn.functional.pad(padded, (0, size - padded.shape[1]), value=fill)
        return torch.where(behind < 0, padded, behind) if name == "position_ids" else padded

    return {**{name: pad(name) for name in rows[0]}, "attention_mask": (behind < 0).long()}

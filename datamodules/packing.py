"""Documents packed into rows of one length, so that hardly a place of a batch is padding.

A pack is a row that holds several documents one behind the other. Targets and drafts keep them apart by `position_ids`,
which restart in each document, and by `seq_lens`, the documents' lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.loading import load_target_config
from dspark_lightning.target import check_packing

Ints = npt.NDArray[np.int64]


def first_fit_decreasing(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Pack documents: the longest first, each into the first pack in which it fits.

    Documents of one length are placed together, which takes a look at all packs for each length that occurs and not
    for each document: n log n to sort, and then packs times different lengths, of which there are at most `capacity`.

    Args:
        lengths: [n], from 1 to capacity.
        capacity: Tokens of a pack.

    Returns:
        documents [n], pack by pack in the order in which they were placed (equal lengths in the order of their
        indices), and the places [packs + 1] in it where each pack begins, with n at the end.
    """
    order = np.argsort(-lengths, kind="stable")
    pack_of = np.empty(len(lengths), np.int64)  # of the documents in this order
    free = np.empty(len(lengths), np.int64)  # of the packs opened so far; there are never more than documents
    packs = start = 0
    for negative, count in zip(*np.unique(-lengths, return_counts=True), strict=True):
        length, left = -int(negative), int(count)
        fitting = np.flatnonzero(free[:packs] >= length)
        room = free[fitting] // length
        taken = np.minimum(room, np.maximum(left - (np.cumsum(room) - room), 0))  # the first packs take what they can
        free[fitting] -= taken * length
        left -= int(taken.sum())
        fresh = np.full(-(-left // (capacity // length)), capacity // length)
        if left:
            fresh[-1] = left - fresh[:-1].sum()
        new = np.arange(packs, packs + len(fresh))
        free[new] = capacity - fresh * length
        packs += len(fresh)
        pack_of[start : start + count] = np.repeat(np.concatenate([fitting, new]), np.concatenate([taken, fresh]))
        start += int(count)
    documents = order[np.argsort(pack_of, kind="stable")]
    return documents, np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))])


@dataclass(frozen=True, eq=False)
class PackedRows(TorchDataset[dict[str, Any]]):
    """Packs of rows; item i is what `join_documents` makes of the rows of pack i.

    Attributes:
        rows: The documents.
        capacity: Tokens of a pack; no document is longer.
        documents: [len(rows)], indices of the rows, pack by pack.
        bounds: [packs + 1], where in `documents` each pack begins.
    """

    kind: ClassVar[str] = "packs"
    rows: RowSet
    capacity: int
    documents: Ints
    bounds: Ints

    @classmethod
    def of(cls, rows: RowSet, capacity: int) -> "PackedRows":
        """Pack rows of at most `capacity` tokens: the same packs for the same rows."""
        return cls(rows, capacity, *first_fit_decreasing(rows.lengths(), capacity))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = self.documents[self.bounds[index] : self.bounds[index + 1]]
        return join_documents([self.rows[i] for i in documents.tolist()])

    def summary(self) -> str:
        """One line of counts."""
        filled = self.rows.lengths().sum() / max(len(self) * self.capacity, 1)
        packs = f"{len(self)} packs of {self.capacity} tokens"
        return f"{self.rows.name}: {len(self.rows)} documents in {packs}, {100 * filled:.1f} % filled"


def join_documents(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row of several documents.

    Args:
        documents: Each with `input_ids` [tokens], whatever else there is for each token, and `row_id` [].

    Returns:
        What there is for each token, joined, and int64 tensors: `position_ids` [S], which restart at 0 in each
        document; `doc_remaining` [S], how many tokens of its document follow each token; `seq_lens` [M], the lengths of
        the M documents; `doc_row_ids` [M]; `row_id` [], that of the first document.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    per_token = [name for name, values in documents[0].items() if values.shape[:1] == (lengths[0],)]
    return {
        **{name: torch.cat([document[name] for document in documents]) for name in per_token},
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "doc_remaining": torch.cat([torch.arange(length - 1, -1, -1) for length in lengths]),
        "seq_lens": torch.tensor(lengths),
        "doc_row_ids": torch.stack([document["row_id"] for document in documents]),
        "row_id": documents[0]["row_id"],
    }


def refuse_unpackable_target(hparams: Mapping[str, Any]) -> None:
    """Refuse a target that would mix the documents of a pack, before it is loaded.

    Args:
        hparams: `target`, `gguf_file` and `trust_remote_code` of the module; any may be missing.

    Raises:
        ValueError: Names the kind of layer and why it mixes documents.
    """
    if hparams.get("target") is None or hparams.get("gguf_file") is not None:
        return  # what cannot be told from a config is refused by the first step
    try:
        config = load_target_config(hparams["target"], bool(hparams.get("trust_remote_code", False)))
    except ValueError:
        return  # the name may mean something to a module with a `load_target` of its own, which says so if not
    check_packing(config)

"""Batches with the target's features, from a cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.writer import documents

Collate = Callable[[Any], dict[str, Tensor]]


class FeatureCollator:
    """Adds `target_hidden_states` [B, S, F*H] and `target_last_hidden_states` [B, S, H], bf16, to batches.

    Args:
        collate: makes batches without them.
        cache: holds the features.
        split: of the rows.
        mask_token_id: the draft's mask token, which no row may contain; None where that is known already.
        required: whether a batch whose rows are not all in the cache is an error; False hands it on as it is.
    """

    def __init__(
        self, collate: Collate, cache: FeatureCache, split: str, mask_token_id: int | None = None, required: bool = True
    ) -> None:
        self.collate, self.cache, self.split = collate, cache, split
        self.mask_token_id, self.required = mask_token_id, required

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        """Collate rows and add their features.

        Raises:
            ValueError: a shard is damaged or the row in it is another one, a row is missing, or has the mask token.
        """
        batch = self.collate(rows)
        found = documents(batch, batch.get("doc_row_ids"))
        held = self.cache.holds(self.split, torch.tensor([row_id for *_, row_id in found]).numpy())
        if not self.required and not held.all():
            return batch
        features: dict[str, Tensor] = {}
        for (i, start, stop, row_id), there in zip(found, held.tolist(), strict=True):
            if not there:
                raise ValueError(
                    f"the feature cache {str(self.cache.folder)!r} lacks {self.split} row {row_id + 1}: dspark "
                    "precompute completes it"
                )
            ids, mask = batch["input_ids"][i, start:stop], batch["loss_mask"][i, start:stop]
            self._check_mask_token(ids, row_id)
            row = self.cache.read(self.split, row_id, ids, mask)
            for name in ("target_hidden_states", "target_last_hidden_states"):
                states = getattr(row, name)
                whole = features.setdefault(name, states.new_zeros(*batch["input_ids"].shape, states.shape[-1]))
                whole[i, start:stop] = states
        return batch | features

    def _check_mask_token(self, ids: Tensor, row_id: int) -> None:
        if self.mask_token_id is not None and bool((ids == self.mask_token_id).any()):
            raise ValueError(
                f"{self.split} row {row_id + 1} of the feature cache {str(self.cache.folder)!r} contains the "
                f"mask_token_id {self.mask_token_id}: the mask token must be one that the data never holds"
            )

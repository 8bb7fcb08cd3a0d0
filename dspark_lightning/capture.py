"""The target's features of a batch, wherever they come from."""

from collections.abc import Mapping
from typing import Any

from dspark_lightning.host import boxes_of
from dspark_lightning.target import DSparkTargetBatch, HFDSparkTargetModel, is_right_padded

FEATURES = ("target_hidden_states", "target_last_hidden_states")
"""Entries of a batch that came with its features: [B, S, F*H] and [B, S, H]."""


def capture(target: HFDSparkTargetModel | None, batch: Mapping[str, Any]) -> DSparkTargetBatch:
    """Take the features that came with a batch, from a cache, or run the target over it.

    Args:
        target: None where every batch brings its features.
        batch: what a datamodule gives, see `DSparkModule.forward`.

    Raises:
        ValueError: neither features nor a target.
    """
    host = {name: box.tensor for name, box in boxes_of(batch).items()}
    places: dict[str, Any] = {"position_ids": batch.get("position_ids"), "seq_lens": host.get("seq_lens")}
    if all(name in batch for name in FEATURES):
        features = {name: batch[name] for name in FEATURES}
        return DSparkTargetBatch(**features, input_ids=batch["input_ids"], loss_mask=host["loss_mask"], **places)
    if target is None:
        raise ValueError(
            f"the batch has no {FEATURES[0]}, and the target that would make them was not loaded, since the features "
            "are read from a cache"
        )
    return target.generate_batch(
        batch["input_ids"],
        None if is_right_padded(host["attention_mask"]) else batch["attention_mask"],
        host["loss_mask"],
        **places,
        **{name: values for name, values in batch.items() if name in target.media_arguments},
    )

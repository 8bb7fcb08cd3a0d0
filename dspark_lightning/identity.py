"""What a checkpoint was trained for: the target, and the draft's config."""

from typing import Any

# Config field -> the argument that sets it.
_SHAPING_FIELDS = {
    "mask_token_id": "mask_token_id",
    "block_size": "block_size",
    "num_hidden_layers": "num_draft_layers",  # before the layer ids, whose default follows from it
    "target_layer_ids": "target_layer_ids",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "enable_confidence_head": "confidence_head_alpha",
    "confidence_head_with_markov": "confidence_head_with_markov",
}


def check_identity(current: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a checkpoint that was trained for something else.

    Args:
        current: of this run: target (its name, for the message only, since a target may move), target_fingerprint
            (of its weights) and draft_config.
        saved: the same, from the checkpoint.

    Raises:
        ValueError: names the first field that differs, with both values.
    """
    if current["target_fingerprint"] != saved["target_fingerprint"]:
        raise ValueError(
            f"the checkpoint was trained for the target {saved['target']!r} (weights {saved['target_fingerprint']}), "
            f"this run has {current['target']!r} (weights {current['target_fingerprint']}): "
            "a draft only fits the target it was trained for"
        )
    for field, argument in _SHAPING_FIELDS.items():
        ours, theirs = current["draft_config"][field], saved["draft_config"][field]
        if ours != theirs:
            raise ValueError(
                f"the checkpoint has {field} {theirs!r}, this run has {ours!r}: "
                f"set {argument} to the checkpoint's value, or start without the checkpoint"
            )

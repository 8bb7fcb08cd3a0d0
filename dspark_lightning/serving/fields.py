"""The fields of an exported draft's config.json."""

from typing import Any

from dspark_lightning.drafts.base import DSparkDraft


def serving_config(draft: DSparkDraft) -> dict[str, Any]:
    """The config.json of an exported draft: the draft's config, and what engines read beside it."""
    config: dict[str, Any] = draft.config.to_dict()
    rope = draft.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    layer_ids = list(config["target_layer_ids"])
    config |= {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in layer_ids],
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": layer_ids,
            "block_size": config["block_size"],
        },
        # transformers 5 writes rope_parameters only, engines also read the older pair.
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
    }
    if draft.rope_label is not None:  # beside a table for each kind of layer transformers would take it for one more
        del config["rope_scaling"]
    return config

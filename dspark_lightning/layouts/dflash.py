"""DFlash checkpoints: the backbone alone, for a draft with new Markov and confidence heads to start from."""

from typing import Any

from dspark_lightning.drafts.config import DraftArgs
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel
from dspark_lightning.layouts.layout import Config, Layout, Weights

_NESTED = ("mask_token_id", "target_layer_ids", "block_size")


def _own_config(config: Config) -> Config:
    # Fields that dflash_config lacks may be at the top.
    nested: dict[str, Any] = config["dflash_config"]
    if config.get("model_type") != "qwen3":
        raise ValueError(
            f"has model_type {config.get('model_type')!r}: of DFlash checkpoints only those with a 'qwen3' backbone "
            "are known"
        )
    backbone = {name: value for name, value in config.items() if name != "dflash_config"}
    return backbone | {
        **{name: nested[name] for name in _NESTED if name in nested},
        "architectures": [Qwen3DSparkModel.__name__],
        "num_target_layers": config.get("num_target_layers"),
        "num_anchors": config.get("num_anchors", DraftArgs.num_anchors),
        "markov_rank": 0,
        "markov_head_type": DraftArgs.markov_head_type,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def _own_weights(weights: Weights) -> Weights:
    for name in weights:
        if name.startswith(("markov_head.", "confidence_head.")):
            raise ValueError(f"has {name!r}: a DFlash draft has no such head, or config.json must describe it")
    return weights


DFLASH = Layout(
    mark="dflash (dflash_config, no markov_rank)",
    recognises=lambda config: isinstance(config.get("dflash_config"), dict) and not config.get("markov_rank"),
    own_config=_own_config,
    own_weights=_own_weights,
)

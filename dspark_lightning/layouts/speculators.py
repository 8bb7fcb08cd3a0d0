"""The speculators layout: the backbone's config nested, layers counted from the embedding (id + 1), the same tensors.

It has Qwen3 backbones only. Two fields are no part of it, and may be missing: num_target_layers and num_anchors.
"""

from dataclasses import dataclass
from typing import Any

from dspark_lightning.drafts.config import DraftArgs
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel
from dspark_lightning.layouts.flat import check_first_slot, deepspec_config
from dspark_lightning.layouts.layout import Config, Layout, Weights
from dspark_lightning.loading import load_target_config, target_source
from dspark_lightning.typed_json import build

_KIND = "speculators_model_type"
_SAME = (
    *("block_size", "mask_token_id", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "num_target_layers", "num_anchors"),
)
"""Fields of a draft that have the same name and place here."""
_AROUND = ("dtype", "torch_dtype", "transformers_version", "tie_word_embeddings")
"""Fields that describe the file, not the backbone."""


@dataclass(frozen=True)
class _Fields:
    transformer_layer_config: dict[str, Any]
    draft_vocab_size: int
    target_hidden_size: int
    aux_hidden_state_layer_ids: list[int]
    block_size: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    num_target_layers: int | None
    num_anchors: int | None


def speculators_config(own: Config, target: str | None) -> Config:
    """From an exported config.json to that of speculators.

    Args:
        own: what the draft exports by default.
        target: folder or hub id; its config says which architecture verifies.

    Raises:
        ValueError: a draft without a Qwen3 backbone, or a target that is not given or cannot be read.
    """
    if own["architectures"] != [Qwen3DSparkModel.__name__]:
        raise ValueError(
            f"the speculators layout holds drafts of type {Qwen3DSparkModel.__name__}, not {own['architectures'][0]}: "
            "export with dspark or deepspec"
        )
    if target is None:
        raise ValueError("the speculators layout names the target that verifies: give target, a folder or a hub id")
    at_the_top = {"architectures", "target_layer_ids", *_SAME, *_AROUND}
    name = target_source(target) if target.startswith("embedded") else target
    return {name: own[name] for name in (*_SAME, *_AROUND) if name in own} | {
        _KIND: "dspark",
        "architectures": own["architectures"],
        "transformer_layer_config": {k: v for k, v in deepspec_config(own).items() if k not in at_the_top},
        "draft_vocab_size": own["vocab_size"],
        "target_hidden_size": own["hidden_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"speculative_tokens": own["block_size"]}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": load_target_config(target).architectures},
        },
    }


def _own_config(config: Config) -> Config:
    if config[_KIND] != "dspark":
        raise ValueError(f"has {_KIND} {config[_KIND]!r}: only 'dspark' is a DSpark draft")
    check_first_slot(config)
    fields = build(_Fields, config)
    backbone = fields.transformer_layer_config
    for name, value, needed in (
        ("transformer_layer_config.model_type", backbone.get("model_type"), "qwen3"),
        ("transformer_layer_config.hidden_size", backbone.get("hidden_size"), fields.target_hidden_size),
    ):
        if value != needed:
            raise ValueError(f"has {name} {value!r}, must be {needed!r}")
    if fields.draft_vocab_size != backbone.get("vocab_size"):
        raise ValueError(
            f"has draft_vocab_size {fields.draft_vocab_size} of {backbone.get('vocab_size')}: drafts with a pruned "
            "vocabulary cannot be loaded, their loss and acceptance are over the target's whole vocabulary"
        )
    same = {name: getattr(fields, name) for name in _SAME}
    return {**backbone, **{name: config[name] for name in _AROUND if name in config}, **same} | {
        "architectures": [Qwen3DSparkModel.__name__],
        "target_layer_ids": [i - 1 for i in fields.aux_hidden_state_layer_ids],
        "num_anchors": DraftArgs.num_anchors if fields.num_anchors is None else fields.num_anchors,
    }


def _own_weights(weights: Weights) -> Weights:
    """Leave out the maps between the two vocabularies, which have to say that there is only one."""
    kept, offsets = weights.pop("t2d", None), weights.pop("d2t", None)
    if (kept is not None and not kept.all()) or (offsets is not None and offsets.any()):
        raise ValueError(
            "has t2d and d2t of a pruned vocabulary: such drafts cannot be loaded, their loss and acceptance are over "
            "the target's whole vocabulary"
        )
    return weights


SPECULATORS = Layout(
    mark=f"speculators ({_KIND} 'dspark')",
    recognises=lambda config: _KIND in config,
    own_config=_own_config,
    own_weights=_own_weights,
)

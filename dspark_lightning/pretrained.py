"""Drafts from folders: a whole one, or weights to start from."""

from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import resolve_draft_class
from dspark_lightning.layouts.saved import check_weights_hash, open_saved_draft

_FROM_TARGET = ("embed_tokens.weight", "lm_head.weight")
_HEADS = {"markov_head": "markov_rank", "confidence_head": "enable_confidence_head"}
"""The field of the config that is zero or false where a draft has no such head."""
_UNUSABLE = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
"""What transformers and torch raise over a config with values that make no model."""


def load_pretrained_draft(path: str | Path) -> DSparkDraft:
    """Load a draft, in the dtype it is stored in.

    Args:
        path: folder that `export_draft` wrote, or one of DeepSpec, NeMo Automodel, speculators or DFlash (without
            heads). Weights are safetensors, in one file or in several with an index.

    Raises:
        ValueError: the folder, its config or its weights cannot be read or do not fit together.
    """
    saved = open_saved_draft(Path(path))
    draft = build_draft_from_config(saved.config)
    state = saved.weights()
    load_strict(draft, state, saved.path)
    check_weights_hash(saved.hash, state, saved.path)
    cast(nn.Module, draft).to(state["fc.weight"].dtype).eval()
    return draft


def load_draft_weights(draft: DSparkDraft, path: str | Path) -> list[str]:
    """Start a draft from a saved one's weights; embedding and head stay those of the target.

    Args:
        draft: it keeps its fresh weights for those of its heads that the saved one was trained without.
        path: folder as for `load_pretrained_draft`.

    Returns:
        the names of the heads that start fresh.

    Raises:
        ValueError: the folder cannot be read, or holds a draft of another family, for other features, for another
            vocabulary, or with other heads; names the field and both values.
    """
    saved, own_config = open_saved_draft(Path(path)), draft.config.to_dict()
    fresh = [head for head, switch in _HEADS.items() if own_config[switch] and not saved.config[switch]]
    for field in _fields_to_match(own_config, fresh):
        if saved.config[field] != own_config[field]:
            raise ValueError(
                f"draft_init {str(path)!r} has {field} {saved.config[field]!r}, this draft has {own_config[field]!r}: "
                "start from a draft of the same kind"
            )
    own = {n: tensor for n, tensor in draft.state_dict().items() if n in _FROM_TARGET or n.partition(".")[0] in fresh}
    state = saved.weights()
    load_strict(draft, state | own, saved.path)
    check_weights_hash(saved.hash, state, saved.path)
    return fresh


def _fields_to_match(own_config: dict[str, Any], fresh: list[str]) -> list[str]:
    """What a saved draft must have in common with the one that starts from it."""
    fields = ["architectures", "target_layer_ids", "num_hidden_layers", "vocab_size"]
    if "markov_head" not in fresh:
        fields += ["markov_rank", "markov_head_type"]
    if "confidence_head" not in fresh:
        fields += ["enable_confidence_head"]
        fields += ["confidence_head_with_markov"] if own_config["enable_confidence_head"] else []
    return fields


def build_draft_from_config(config: dict[str, Any]) -> DSparkDraft:
    """Build the draft that a config.json (as a dict) describes, with fresh weights.

    Raises:
        ValueError: no registered draft has the config's architecture, or its values make no draft.
    """
    model_class = resolve_draft_class(config.get("architectures"))
    # The older pair says what rope_parameters says again; without a theta the draft has no RoPE at all.
    if config.get("rope_parameters") or config.get("rope_theta") is None:
        config = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    try:
        return model_class(model_class.config_class.from_dict(config))
    except _UNUSABLE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the config of a {model_class.__name__} cannot be used: {reason}") from error


def load_strict(draft: DSparkDraft, state: dict[str, Tensor], path: Path) -> None:
    """Load weights of exactly the draft's names and shapes.

    Raises:
        ValueError: names a weight that is missing, one too many or of another shape, and `path`, where it came from.
    """
    own = draft.state_dict()
    for name in sorted(own.keys() | state.keys()):
        here, there = (tuple(s[name].shape) if name in s else None for s in (own, state))
        if here != there:
            raise ValueError(f"{name!r} has shape {there} in {str(path)!r}, the draft needs {here}")
    draft.load_state_dict(state)

"""Drafts from folders: a whole one, or weights to start from."""

import json
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import resolve_draft_class

DRAFT_FILES = _WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_FROM_TARGET = ("embed_tokens.weight", "lm_head.weight")


def load_pretrained_draft(path: str | Path) -> DSparkDraft:
    """Load an exported draft, in the dtype it is stored in.

    Args:
        path: folder with model.safetensors and config.json.

    Raises:
        ValueError: the folder, its config or its weights cannot be read or do not fit together.
    """
    config = _read_config(Path(path))
    draft = build_draft_from_config(config)
    state = _read_weights(Path(path))
    load_strict(draft, state, Path(path))
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name!r} of the draft in {str(path)!r} holds NaN or infinite values")
    cast(nn.Module, draft).to(state["fc.weight"].dtype).eval()
    return draft


def load_draft_weights(draft: DSparkDraft, path: str | Path) -> None:
    """Start a draft from an exported folder's weights; embedding and head stay those of the target.

    Raises:
        ValueError: the folder cannot be read, or holds a draft of another family, for other features, or with other
            heads; names the field and both values.
    """
    saved, own_config = _read_config(Path(path)), draft.config.to_dict()
    for field in ("architectures", "target_layer_ids", "num_hidden_layers", "markov_rank", "markov_head_type"):
        if saved.get(field) != own_config[field]:
            raise ValueError(
                f"draft_init {str(path)!r} has {field} {saved.get(field)!r}, this draft has {own_config[field]!r}: "
                "start from a draft of the same kind"
            )
    state = _read_weights(Path(path))
    own = {name: tensor for name, tensor in draft.state_dict().items() if name in _FROM_TARGET}
    load_strict(draft, state | own, Path(path))


def build_draft_from_config(config: dict[str, Any]) -> DSparkDraft:
    """Build the draft that a config.json (as a dict) describes, with fresh weights.

    Raises:
        ValueError: no registered draft has the config's architecture.
    """
    model_class = resolve_draft_class(config.get("architectures"))
    given = {"confidence_head_with_markov": False, **config}
    # The older pair says what rope_parameters says again; without a theta the draft has no RoPE at all.
    if given.get("rope_parameters") or given.get("rope_theta") is None:
        given = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_scaling")}
    try:
        return model_class(model_class.config_class.from_dict(given))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the config of a {model_class.__name__} cannot be used: {reason}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / _CONFIG).is_file():
        hint = ""
        if path.is_file():
            hint = " (a checkpoint? write its draft with dspark export)"
        elif (path / "dspark-draft" / _CONFIG).is_file():
            hint = f" (there is one in {str(path / 'dspark-draft')!r})"
        raise ValueError(f"{str(path)!r} is no folder with an exported draft: it has no {_CONFIG}{hint}")
    try:
        config: dict[str, Any] = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {str(path / _CONFIG)!r}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path / _CONFIG)!r} must hold an object of config fields, got a {type(config).__name__}")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {str(path / _WEIGHTS)!r}: {error}") from error


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

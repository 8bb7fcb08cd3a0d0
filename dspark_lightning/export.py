"""The folder that serving engines load: `model.safetensors` and `config.json`.

Flat tensor names in bf16, embedding and head included; the config carries every field that vLLM, SGLang and
llama.cpp's converter look for.
"""

import json
import pickle
import shlex
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import resolve_draft_class
from dspark_lightning.loading import target_source
from dspark_lightning.replace import outdated_path, replace_path, scratch_path
from dspark_lightning.sharded_checkpoint import read_sharded_meta, read_sharded_weights
from dspark_lightning.sharding import is_sharded

_FILES = _WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_FROM_TARGET = ("embed_tokens.weight", "lm_head.weight")


def export_draft(draft: DSparkDraft, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Write a draft as a servable folder; an existing one is replaced only once the new one is complete.

    Warns where an engine cannot serve this draft.

    Args:
        draft: any DSpark draft.
        path: folder to write; its name must contain "dspark" and not "dflash", since engines go by it.
        weights: written in place of the draft's own state dict, for a draft that is split over ranks.

    Returns:
        the folder.

    Raises:
        ValueError: a name that engines would misread, something else in the folder's place, weights that are not
            finite or split over ranks, or a place that cannot be written.
    """
    path = check_export_path(path)
    if weights is None and is_sharded(draft):
        raise ValueError(
            "the draft is split over ranks: have every rank call dspark_lightning.sharding.full_state_dict(draft), and "
            "rank 0 pass what it returns as weights"
        )
    weights = draft.state_dict() if weights is None else weights
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"the draft cannot be exported: {name!r} holds NaN or infinite values")
    for warning in engine_warnings(draft):
        warnings.warn(warning, stacklevel=2)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in weights.items()}
    scratch = scratch_path(path)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        # Tied targets share one tensor between embedding and head; the file must hold both.
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        save_file(copies, scratch / _WEIGHTS, metadata={"format": "pt"})
        (scratch / _CONFIG).write_text(json.dumps(serving_config(draft), indent=2, sort_keys=True) + "\n")
        # safetensors keeps the file to its owner; who serves may be another user.
        (scratch / _WEIGHTS).chmod((scratch / _CONFIG).stat().st_mode)
        replace_path(scratch, path)
    except OSError as error:
        raise ValueError(f"cannot write the draft to {str(path)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def serve_command(path: Path, target: str, block_size: int) -> str:
    """The command that serves an exported draft beside its target."""
    target = target_source(target) if target.startswith("embedded") else target
    speculative = json.dumps({"model": str(path), "num_speculative_tokens": block_size})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)}"


def check_export_path(path: str | Path) -> Path:
    """Check that engines will take the folder's name for a DSpark draft, and that nothing else lies there.

    Raises:
        ValueError: "dspark" missing from the name, or "dflash" in it; a file, a link, or a folder with other content.
    """
    path = Path(path).expanduser()
    if "dspark" not in path.name.lower() or "dflash" in path.name.lower():
        raise ValueError(
            f"the folder name {path.name!r} must contain 'dspark' and not 'dflash': engines tell the method by it, "
            f"for example {str(path.parent / 'my-dspark')!r}"
        )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{str(path)!r} is a file or a link, must be a folder to write or an earlier export")
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in _FILES) if path.exists() else []
    if others:
        raise ValueError(f"{str(path)!r} holds {others[0]!r}, so it is no earlier export and will not be replaced")
    return path


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


def engine_warnings(draft: DSparkDraft) -> list[str]:
    """One line for each engine that cannot serve this draft as it is, and why."""
    config, lines = draft.config, []
    last = config.num_target_layers - 1
    unservable = [i for i in config.target_layer_ids if i in (-1, last)]
    if unservable:
        lines.append(f"SGLang cannot capture feature layer {unservable[0]}: use layers 0..{last - 1}")
    if config.markov_rank == 0:
        lines.append("SGLang cannot serve a DSpark draft with markov_rank 0")
    elif config.markov_head_type != "vanilla":
        lines.append(f"vLLM and llama.cpp serve the vanilla Markov head only, not {config.markov_head_type!r}")
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        lines.append("llama.cpp needs a confidence head that reads the Markov embedding")
    return lines


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
    _load_strict(draft, state, Path(path))
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
    _load_strict(draft, state | own, Path(path))


def load_checkpoint_draft(ckpt_path: str | Path) -> tuple[DSparkDraft, str]:
    """Take the draft out of a training checkpoint, file or folder; the target is not needed.

    Returns:
        the draft, and the name of the target it was trained for.

    Raises:
        ValueError: it cannot be read, is incomplete, or was not written by a `DSparkModule`.
    """
    checkpoint, path, prefix = read_checkpoint(ckpt_path), Path(ckpt_path), "draft."
    weights = read_sharded_weights(path) if path.is_dir() else checkpoint["state_dict"]
    state = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    draft = build_draft_from_config(checkpoint["dspark"]["draft_config"])
    _load_strict(draft, state, Path(ckpt_path))
    cast(nn.Module, draft).eval()
    return draft, checkpoint["dspark"]["target"]


def read_checkpoint(ckpt_path: str | Path) -> dict[str, Any]:
    """Open a training checkpoint: a file, its tensors left on disk, or what is no weight of a sharded folder.

    Raises:
        ValueError: it cannot be read, is incomplete, or was not written by a `DSparkModule`.
    """
    path = Path(ckpt_path)
    if not path.exists() and outdated_path(path).exists():
        raise ValueError(
            f"there is no checkpoint {str(path)!r}: a run died as it put a new one there; its predecessor is "
            f"{str(outdated_path(path))!r}"
        )
    checkpoint = read_sharded_meta(path) if path.is_dir() else _read_checkpoint_file(path)
    identity = checkpoint.get("dspark") if isinstance(checkpoint, dict) else None
    complete = isinstance(identity, dict) and {"target", "target_fingerprint", "draft_config"} <= identity.keys()
    if not complete or not (path.is_dir() or "state_dict" in checkpoint):
        raise ValueError(f"the checkpoint {str(path)!r} was not written by a DSparkModule")
    return checkpoint


def _read_checkpoint_file(path: Path) -> dict[str, Any]:
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"cannot read the checkpoint {str(path)!r}: {error.strerror or error}") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{str(path)!r} is not a checkpoint file, or is damaged ({type(error).__name__})") from error
    return checkpoint


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


def _load_strict(draft: DSparkDraft, state: dict[str, Tensor], path: Path) -> None:
    own = draft.state_dict()
    for name in sorted(own.keys() | state.keys()):
        here, there = (tuple(s[name].shape) if name in s else None for s in (own, state))
        if here != there:
            raise ValueError(f"{name!r} has shape {there} in {str(path)!r}, the draft needs {here}")
    draft.load_state_dict(state)

"""The folder that serving engines load: `model.safetensors` and `config.json`.

Flat tensor names in bf16, embedding and head included; the config carries every field that vLLM, SGLang and
llama.cpp's converter look for.
"""

import json
import shlex
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.layouts.written import ExportLayout, written_config
from dspark_lightning.loading import target_source
from dspark_lightning.pretrained import DRAFT_FILES
from dspark_lightning.replace import replace_path, scratch_path
from dspark_lightning.sharding import is_sharded

_WEIGHTS, _CONFIG = DRAFT_FILES


def export_draft(
    draft: DSparkDraft,
    path: str | Path,
    weights: Mapping[str, Tensor] | None = None,
    layout: ExportLayout = "dspark",
    target: str | None = None,
) -> Path:
    """Write a draft as a servable folder; an existing one is replaced only once the new one is complete.

    Warns where an engine cannot serve this draft.

    Args:
        draft: any DSpark draft.
        path: folder to write; its name must contain "dspark" and not "dflash", since engines go by it.
        weights: written in place of the draft's own state dict, for a draft that is split over ranks.
        layout: dspark for serving engines, deepspec for DeepSpec and NeMo Automodel, or speculators.
        target: folder or hub id of the target, which the speculators layout names; its config is read.

    Returns:
        the folder.

    Raises:
        ValueError: a name that engines would misread, something else in the folder's place, weights that are not
            finite or split over ranks, a layout that cannot hold the draft, or a place that cannot be written.
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
        config = written_config(serving_config(draft), layout, target)
        scratch.mkdir(parents=True)
        # Tied targets share one tensor between embedding and head; the file must hold both.
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        save_file(copies, scratch / _WEIGHTS, metadata={"format": "pt"})
        (scratch / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
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
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in DRAFT_FILES) if path.exists() else []
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
    # A draft read from a folder of another tool may not know how many layers its target has.
    last = None if config.num_target_layers is None else config.num_target_layers - 1
    unservable = [i for i in config.target_layer_ids if i in (-1, last)]
    if unservable:
        use = "layers from 0 on, not the last" if last is None else f"layers 0..{last - 1}"
        lines.append(f"SGLang cannot capture feature layer {unservable[0]}: use {use}")
    if config.markov_rank == 0:
        lines.append("SGLang cannot serve a DSpark draft with markov_rank 0")
    elif config.markov_head_type != "vanilla":
        lines.append(f"vLLM and llama.cpp serve the vanilla Markov head only, not {config.markov_head_type!r}")
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        lines.append("llama.cpp needs a confidence head that reads the Markov embedding")
    return lines

"""The folder that serving engines load: `model.safetensors` and `config.json`; a model card and a record beside them.

Flat tensor names in bf16, embedding and head included; the config carries every field that vLLM, SGLang and
llama.cpp's converter look for.
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.features.hashing import weights_hash
from dspark_lightning.layouts.files import CONFIG, WEIGHTS
from dspark_lightning.layouts.flat import WEIGHTS_HASH
from dspark_lightning.layouts.layout import Config
from dspark_lightning.layouts.written import ExportLayout, written_config
from dspark_lightning.replace import alone_in, replace_path, scratch_path
from dspark_lightning.serving.card import write_about
from dspark_lightning.serving.engines import engine_limits
from dspark_lightning.serving.fields import serving_config
from dspark_lightning.serving.folder import EXPORT_FILES
from dspark_lightning.serving.record import ExportRecord
from dspark_lightning.serving.static_checks import check_header
from dspark_lightning.sharding import is_sharded
from dspark_lightning.tensor_files import write_tensors


def export_draft(
    draft: DSparkDraft,
    path: str | Path,
    weights: Mapping[str, Tensor] | None = None,
    layout: ExportLayout = "dspark",
    target: str | None = None,
    record: ExportRecord | None = None,
) -> Path:
    """Write a draft as a servable folder; an existing one is replaced only once the new one is complete and checked.

    Warns where an engine cannot serve this draft.

    Args:
        draft: any DSpark draft.
        path: folder to write; its name must contain "dspark" and not "dflash", since engines go by it.
        weights: written in place of the draft's own state dict, for a draft that is split over ranks.
        layout: dspark for serving engines, deepspec for DeepSpec and NeMo Automodel, or speculators.
        target: folder or hub id of the target, which the speculators layout names; its config is read.
        record: what is known of the draft, for the model card of the layout dspark; it is kept in the folder.

    Returns:
        the folder.

    Raises:
        ValueError: a name that engines would misread, something else in the folder's place, weights that are not
            finite or split over ranks, a layout that cannot hold the draft, a folder that would not be served, or a
            place that cannot be written.
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
    for limit in engine_limits(draft.config):
        warnings.warn(limit.line, stacklevel=2)
    # Tied targets share one tensor between embedding and head; the file must hold both.
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).clone() for name, tensor in weights.items()}
    config = written_config(serving_config(draft), layout, target)
    with alone_in(path.parent):  # a second run with the same folder would write the same files
        scratch = scratch_path(path)
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            if layout == "dspark":
                _write_files(scratch, weights, config | {WEIGHTS_HASH: weights_hash(weights)})
                write_about(scratch, draft.config, record or ExportRecord(), path.name)
                check_header(scratch)
            else:
                _write_files(scratch, weights, config)
            replace_path(scratch, path)
        except OSError as error:
            raise ValueError(f"cannot write the draft to {str(path)!r}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def _write_files(folder: Path, weights: dict[str, Tensor], config: Config) -> None:
    folder.mkdir(parents=True)
    write_tensors(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # safetensors keeps the file to its owner; who serves may be another user.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)


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
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in EXPORT_FILES) if path.exists() else []
    if others:
        raise ValueError(f"{str(path)!r} holds {others[0]!r}, so it is no earlier export and will not be replaced")
    return path

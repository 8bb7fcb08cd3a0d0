"""Reading training checkpoints, and the draft inside."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dspark_lightning.checkpoint_content import check_content
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.pretrained import build_draft_from_config, load_strict
from dspark_lightning.replace import outdated_path
from dspark_lightning.sharded_checkpoint import read_sharded_meta, read_sharded_weights


def load_checkpoint_draft(ckpt_path: str | Path) -> tuple[DSparkDraft, str]:
    """Take the draft out of a training checkpoint, file or folder; the target is not needed.

    Returns:
        the draft, and the name of the target it was trained for.

    Raises:
        ValueError: it cannot be read, is incomplete or damaged, or was not written by a `DSparkModule`.
    """
    checkpoint, path, prefix = read_checkpoint(ckpt_path), Path(ckpt_path), "draft."
    check_content(path)
    weights = read_sharded_weights(path) if path.is_dir() else checkpoint["state_dict"]
    state = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    draft = build_draft_from_config(checkpoint["dspark"]["draft_config"])
    load_strict(draft, state, Path(ckpt_path))
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
    except Exception as error:  # bytes that have changed make pickle do anything
        raise ValueError(f"{str(path)!r} is not a checkpoint file, or is damaged ({type(error).__name__})") from error
    return checkpoint

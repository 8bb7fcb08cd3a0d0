"""Checkpoint folders that FSDP writes, read without FSDP, without other ranks and without the optimizer's states.

A folder holds one `.distcp` file per rank with pieces of tensors, `.metadata` that says where each piece lies, and
`meta.pt` with all that is no tensor. FSDP1 and FSDP2 name the module's weights differently.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

_META = "meta.pt"
_WRITERS = {"model.": "FSDP1", "state_dict.": "FSDP2"}  # by what they put before the names of the module's weights


def read_sharded_meta(path: Path) -> dict[str, Any]:
    """Read what is no tensor from a sharded checkpoint.

    Raises:
        ValueError: the folder is no checkpoint, or part of it is missing.
    """
    _read_metadata(path)
    try:
        meta: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(_broken(path, f"{_META} cannot be read ({type(error).__name__})")) from error
    return meta


def read_sharded_weights(path: Path) -> dict[str, Tensor]:
    """Read the LightningModule's weights, whole, by their names in its state dict.

    Raises:
        ValueError: the folder is no checkpoint, or part of it is missing.
    """
    entries = _read_metadata(path).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(tuple(_WRITERS)) and isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=path, no_dist=True)
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def written_by(path: Path) -> str:
    """Whether "FSDP1" or "FSDP2" wrote a sharded checkpoint.

    Raises:
        ValueError: as for `read_sharded_meta`.
    """
    names = _read_metadata(path).state_dict_metadata
    return next(writer for key, writer in _WRITERS.items() if any(name.startswith(key) for name in names))


def _read_metadata(path: Path) -> Metadata:
    _check_present(path, ".metadata")
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(_broken(path, f".metadata cannot be read ({type(error).__name__})")) from error
    ends: dict[str, int] = {}
    for piece in (metadata.storage_data or {}).values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        _check_present(path, name)
        if (size := (path / name).stat().st_size) < end:
            raise ValueError(_broken(path, f"{name} has {size} bytes of {end}"))
    _check_present(path, _META)
    return metadata


def _check_present(path: Path, name: str) -> None:
    if not (path / name).exists():
        raise ValueError(_broken(path, f"{name} is missing"))


def _broken(path: Path, problem: str) -> str:
    return f"{str(path)!r} is no complete sharded checkpoint: {problem}"

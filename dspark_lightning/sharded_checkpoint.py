"""Checkpoint folders that FSDP writes, read without FSDP, without other ranks and without the optimizer's states.

A folder holds one `.distcp` file per rank with pieces of tensors, `.metadata` that says where each piece lies, and
`meta.pt` with all that is no tensor. FSDP1 and FSDP2 name the module's weights differently.

`.metadata` is a pickle, which could run any code; only the classes that describe pieces are admitted. It is the one
file without a checksum of its own, so a folder also has its hash, in `metadata.hash`.
"""

import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dspark_lightning.features.hashing import content_hash

META = "meta.pt"
_SEAL = "metadata.hash"
_WRITERS = {"model.": "FSDP1", "state_dict.": "FSDP2"}  # by what they put before the names of the module's weights
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
"""What a `.metadata` may name, by module; nothing of it does more than hold values."""


def seal(path: Path) -> None:
    """Put the hash of `.metadata` into a folder that is written otherwise."""
    (path / _SEAL).write_text(content_hash([(path / ".metadata").read_bytes()]))


def read_sharded_meta(path: Path) -> dict[str, Any]:
    """Read what is no tensor from a sharded checkpoint.

    Raises:
        ValueError: the folder is no checkpoint, or part of it is missing.
    """
    _read_metadata(path)
    try:
        meta: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that have changed make pickle do anything
        raise ValueError(_broken(path, f"{META} cannot be read ({type(error).__name__})")) from error
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
    with readable(path):
        load(tensors, storage_reader=_Reader(path), no_dist=True)
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def stored_pieces(path: Path) -> Collection[Any]:
    """Where each piece of a tensor lies: its `relative_path` in the folder, `offset` and `length` in bytes.

    Raises:
        ValueError: as for `read_sharded_meta`.
    """
    pieces: dict[Any, Any] = _read_metadata(path).storage_data or {}
    return pieces.values()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Have what torch raises over a sharded checkpoint, with the tracebacks of all ranks, end in one line.

    Raises:
        ValueError: a piece of a tensor cannot be read.
    """
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        # What torch says of a refused pickle is advice to trust it.
        kind, said = type(cause).__name__, str(cause).splitlines()
        reason = said[0] if said and not isinstance(cause, pickle.UnpicklingError) else kind
        raise ValueError(f"the checkpoint {str(path)!r} cannot be read: {reason}") from error


def written_by(path: Path) -> str:
    """Whether "FSDP1" or "FSDP2" wrote a sharded checkpoint.

    Raises:
        ValueError: as for `read_sharded_meta`.
    """
    names = _read_metadata(path).state_dict_metadata
    return next(writer for key, writer in _WRITERS.items() if any(name.startswith(key) for name in names))


class _Unpickler(pickle.Unpickler):
    """Admits `_DESCRIPTIONS` alone, by their exact names: with a dot in it a name could reach into another module."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in _DESCRIPTIONS.get(module_name, ()):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which describes no tensor")
        return super().find_class(module_name, global_name)


class _Reader(FileSystemReader):
    """Reads pieces where `.metadata` says they are, without trusting it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        return _unpickle_metadata(Path(self.path))


def _unpickle_metadata(path: Path) -> Metadata:
    try:
        content = (path / ".metadata").read_bytes()
        sealed = (path / _SEAL).read_bytes() if (path / _SEAL).exists() else None  # older folders lack it
        if sealed is not None and sealed != content_hash([content]).encode():
            raise pickle.UnpicklingError("it is not what was written")
        metadata = _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(_broken(path, f".metadata cannot be read ({error})")) from error
    except Exception as error:  # what a damaged pickle raises depends on where it is damaged
        raise ValueError(_broken(path, f".metadata cannot be read ({type(error).__name__})")) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(_broken(path, f".metadata holds a {type(metadata).__name__}"))
    return metadata


def _read_metadata(path: Path) -> Metadata:
    _check_present(path, ".metadata")
    metadata = _unpickle_metadata(path)
    ends: dict[str, int] = {}
    for piece in (metadata.storage_data or {}).values():
        if Path(piece.relative_path).name != piece.relative_path:
            raise ValueError(_broken(path, f".metadata names {piece.relative_path!r}, which is not inside"))
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in sorted(ends.items()):
        _check_present(path, name)
        if (size := (path / name).stat().st_size) < end:
            raise ValueError(_broken(path, f"{name} has {size} bytes of {end}"))
    _check_present(path, META)
    return metadata


def _check_present(path: Path, name: str) -> None:
    if not (path / name).exists():
        raise ValueError(_broken(path, f"{name} is missing"))


def _broken(path: Path, problem: str) -> str:
    return f"{str(path)!r} is no complete sharded checkpoint: {problem}"

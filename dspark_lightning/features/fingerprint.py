"""What features depend on: a cache made for anything else must not be trained from."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.features.hashing import content_hash
from dspark_lightning.loading import target_source

NORM = "decoder outputs, streams averaged; the last layer's behind the final norm"
"""How features are taken, see `dspark_lightning.target`."""

_WEIGHT_FILES = ("*.safetensors", "*.bin")  # the first kind that is there is loaded
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


@dataclass(frozen=True)
class Fingerprint:
    """Hashes and values, each None where a run cannot know it."""

    target_config: str | None = None  # of the target's config
    target_weights: str | None = None  # see `HFDSparkTargetModel.fingerprint`; known once the target is loaded
    target_files: str | None = None  # of its weight files, where they are on this machine
    target_layer_ids: list[int] | None = None
    norm: str | None = None  # see `NORM`
    tokenizer: str | None = None
    chat_template: str | None = None
    template_options: str | None = None  # and which turns are supervised
    max_length: int | None = None  # of a row, in tokens
    data: dict[str, str] | None = None  # of the ids, masks and weights of all rows, by split

    def identity(self) -> str:
        """One hash over all that is the same on every machine."""
        known = {name: value for name, value in asdict(self).items() if name != "target_files"}
        return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8).hexdigest()


def check_fingerprint(current: Fingerprint, saved: Fingerprint, folder: Path) -> None:
    """Refuse a cache that was made for something else.

    Args:
        current: of this run; what is None in one of the two is not compared.
        saved: of the cache.
        folder: of the cache, for the error.

    Raises:
        ValueError: names the first field that differs, with both values.
    """
    for field in fields(Fingerprint):
        ours, theirs = getattr(current, field.name), getattr(saved, field.name)
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(
                f"the feature cache {str(folder)!r} was made with {field.name} {theirs!r}, this run has {ours!r}: "
                "use the settings it was made with, or precompute into another folder"
            )


def config_digest(config: PretrainedConfig) -> str:
    """Hash of a target's config, without where it was loaded from and how."""
    return _digest(_lasting(config.to_dict()))


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def template_fields(renderer: ChatRenderer) -> dict[str, Any]:
    """The fields of a fingerprint that a renderer decides."""
    vocabulary, special_tokens, template, *options = renderer.state()
    return {
        "tokenizer": _digest([vocabulary, special_tokens]),
        "chat_template": _digest(template),
        "template_options": json.dumps(options, sort_keys=True),
    }


def rows_digest(rows: RowSet) -> str:
    """Hash of everything in rows that is trained on: ids, masks, weights, pictures, and which row is which."""
    table = rows.table.select_columns([name for name in rows.table.column_names if name not in ("error", "fault")])
    return content_hash(_columns(table, rows.kept))


def _columns(table: Dataset, places: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """The values of some rows, a thousand at a time, column by column; lists flat, behind their lengths."""
    for start in range(0, len(places), 1000):
        batch = table.select(places[start : start + 1000]).with_format("arrow")[:]
        for name in batch.column_names:
            column = batch.column(name).combine_chunks()
            if pa.types.is_list(column.type):
                yield pc.list_value_length(column).to_numpy()
                column = column.flatten()
            yield column.to_numpy(zero_copy_only=False)


def files_digest(target: str, gguf_file: str | None = None) -> str | None:
    """Hash of sizes and samples of a target's weight files: quick, and another one once the target was trained further.

    Args:
        target: folder, hub id or "embedded".
        gguf_file: the one file of it that is loaded, if it is a GGUF file.

    Returns:
        None where the files are not on this machine.
    """
    try:
        source = target_source(target)
        folder = Path(source if os.path.isdir(source) else snapshot_download(source, local_files_only=True))
    except (OSError, ValueError):
        return None
    patterns = _WEIGHT_FILES if gguf_file is None else (glob.escape(gguf_file),)
    files = next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])
    return content_hash(part for path in files for part in _samples(path)) if files else None


def _samples(path: Path) -> Iterator[str | npt.NDArray[np.uint8]]:
    size = path.stat().st_size
    yield f"{path.name}:{size}"
    content = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    for place in np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(int).tolist():
        yield content[place : place + _SAMPLE_BYTES]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

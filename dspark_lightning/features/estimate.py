"""How big a feature cache gets, before anything is written."""

import shutil
from pathlib import Path

from dspark_lightning.features.manifest import Manifest

_GB = 10**9


def bytes_per_token(num_features: int, hidden_size: int) -> int:
    """Of a row in the cache: F features and the last state in bf16, the id as int32, the mask as uint8."""
    return 2 * (num_features + 1) * hidden_size + 4 + 1


def check_size(folder: Path, manifest: Manifest, tokens_to_write: int, limit_gb: float | None) -> str:
    """Refuse a cache that has no room.

    Args:
        folder: of the cache, there or not.
        manifest: of the cache.
        tokens_to_write: of the rows that are missing.
        limit_gb: what the whole cache may take, in 10^9 bytes; None asks for free space only.

    Returns:
        one line for people.

    Raises:
        ValueError: the cache would take more than the limit, or than is free.
    """
    tokens = sum(size.tokens for size in manifest.splits.values())
    rows = sum(size.rows for size in manifest.splits.values())
    whole, rest = tokens * manifest.bytes_per_token, tokens_to_write * manifest.bytes_per_token
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    size = f"{rows:,} rows, {tokens:,} tokens of {manifest.bytes_per_token:,} bytes: {_gb(whole)}"
    if limit_gb is not None and whole > limit_gb * _GB:
        raise ValueError(f"the feature cache {str(folder)!r} would take {size}, more than limit_gb {limit_gb}")
    if rest > free:
        raise ValueError(
            f"the feature cache {str(folder)!r} needs {_gb(rest)} more ({size}), but {_gb(free)} are free there"
        )
    return f"Feature cache {folder}: {size}; {_gb(rest)} of them still to be written, {_gb(free)} free"


def _gb(count: int) -> str:
    return f"{count / _GB:.2f} GB" if count >= _GB / 100 else f"{count / 10**6:.2f} MB"

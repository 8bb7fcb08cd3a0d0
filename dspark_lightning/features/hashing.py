"""Hashes over the bytes of arrays. They guard against accidents, not against people."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Values = npt.NDArray[np.generic] | Tensor | str | bytes


def content_hash(values: Iterable[Values]) -> str:
    """128 bits over all values in order, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for each in values:
        digest.update(_raw(each))
    return digest.hexdigest()


def checksum(values: Iterable[Values]) -> int:
    """64 bits over all values in order, as a signed number."""
    digest = xxhash.xxh3_64()
    for each in values:
        digest.update(_raw(each))
    return int(np.uint64(digest.intdigest()).astype(np.int64))


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Of a model's weights on the CPU, by name; in which order they come does not matter."""
    return content_hash(part for name in sorted(weights) for part in (name, weights[name].flatten()))


def _raw(values: Values) -> bytes | memoryview:
    if isinstance(values, str):
        return values.encode()
    if isinstance(values, bytes):
        return values
    if isinstance(values, Tensor):
        values = values.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

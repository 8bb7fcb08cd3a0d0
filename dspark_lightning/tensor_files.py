"""Writing safetensors files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors to a file, which is on the disk when this returns.

    Raises:
        OSError: it cannot be written; with the system's own number and words, which safetensors puts into a text.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(str(error)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error

"""The files of a draft folder: JSON, and tensors in one safetensors file or in several with an index.

What others wrote is data: nothing is unpickled, nothing outside the folder is opened, no code is run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dspark_lightning.layouts.layout import Config, Weights
from dspark_lightning.typed_json import build, parse

WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX = f"{WEIGHTS}.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


def read_json_object(path: Path) -> Config:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold an object of fields, got a {type(content).__name__}")
    return content


def read_weights(folder: Path) -> Weights:
    """Read all tensors of a folder.

    Raises:
        ValueError: a file is missing, damaged, pickled or outside the folder.
    """
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).exists():
        return _read_shards(folder)
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled and not (folder / WEIGHTS).exists():
        raise ValueError(
            f"{str(folder)!r} has {pickled[0]!r} and no {WEIGHTS}: pickled weights can run code and are never read, "
            "save them as safetensors"
        )
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {str(folder / WEIGHTS)!r}: {error}") from error


def _read_shards(folder: Path) -> Weights:
    """Read the tensors that the index names."""
    content = read_json_object(folder / INDEX)
    try:
        index = build(_Index, content)
    except ValueError as error:
        raise ValueError(f"{str(folder / INDEX)!r} {error}") from error
    names_by_file: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{str(folder / INDEX)!r} says that {name!r} is in {file!r}, must be a .safetensors file beside it"
            )
        names_by_file.setdefault(file, []).append(name)
    return {name: tensor for file, names in names_by_file.items() for name, tensor in _read_some(folder / file, names)}


def _read_some(path: Path, names: list[str]) -> list[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            return [(name, file.get_tensor(name)) for name in names]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {str(path)!r}, which {INDEX} names: {error}") from error

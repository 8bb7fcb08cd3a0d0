"""`dspark.json`, beside the weights of an exported draft: how it was trained, and what it gave when it was written."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark_lightning.typed_json import build, parse

RECORD_FILE = "dspark.json"


@dataclass(frozen=True)
class Training:
    """How a draft was trained."""

    steps: int  # optimizer steps behind the weights
    data: str | None  # what the datamodule reads
    settings: dict[str, Any]  # plain values by name


@dataclass(frozen=True)
class Validation:
    """What a validation on held-out rows measured."""

    step: int  # optimizer steps at that time
    tau: float  # tokens per target pass
    acceptance: list[float]  # by position in the block


@dataclass(frozen=True)
class Decoded:
    """What greedy decoding of the record's prompts gave, with the weights as they lie in the folder."""

    tau: float  # tokens per target pass
    rounds: int  # over which it is the mean
    max_new_tokens: int  # of each answer
    dtype: str  # of target and draft
    machine: dict[str, Any]  # what the numbers could depend on beside the weights
    accepted: list[list[int]] | None = None  # of each prompt, drafted tokens that each round accepted


@dataclass(frozen=True)
class ExportRecord:
    """Content of `dspark.json`; None or empty for what is not known."""

    target: str | None = None
    gguf_file: str | None = None
    training: Training | None = None
    validation: Validation | None = None
    prompts: list[list[int]] = field(default_factory=list)  # token ids of held-out prompts
    decoded: Decoded | None = None

    def text(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self)) + "\n"


def read_record(folder: Path) -> ExportRecord | None:
    """Read the record of an exported draft; None where there is none.

    Raises:
        ValueError: it cannot be read; names the file.
    """
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        return build(ExportRecord, parse(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no record of an export: {error}") from error

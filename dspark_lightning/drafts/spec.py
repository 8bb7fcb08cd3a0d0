"""What a family registers: its draft, its config builder, and the targets it serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from dspark_lightning.drafts.base import DSparkDraft


@dataclass(frozen=True)
class DraftSpec:
    """One family.

    Attributes:
        model_class: the draft.
        build_config: from the target's config and the model arguments (see `DraftArgs`) to the draft's config.
        architectures: class names of the targets served.
        model_types: `model_type` of the targets served; looked at when the architecture is unknown.
    """

    model_class: type[DSparkDraft]
    build_config: Callable[[PretrainedConfig, Any], PretrainedConfig]
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]

"""Which draft serves which target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel, build_qwen3_draft_config


@dataclass(frozen=True)
class DraftSpec:
    """One family: its draft class, its config builder, and the targets it serves."""

    model_class: type[DSparkDraft]
    build_config: Callable[[PretrainedConfig, Any], PretrainedConfig]
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]


QWEN3 = DraftSpec(
    Qwen3DSparkModel,
    build_qwen3_draft_config,
    architectures=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    ),
    model_types=("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl"),
)

# Keyed by the target's architecture and by its model_type. A new family is one file and one entry of its own here.
DSPARK_DRAFT_REGISTRY: dict[str, DraftSpec] = {
    name: spec for spec in (QWEN3,) for name in (*spec.architectures, *spec.model_types)
}


def resolve_dspark_draft_spec(architectures: Sequence[str] | None) -> DraftSpec:
    """Find the draft for a target's `architectures` (or model types).

    Raises:
        ValueError: none is registered; the line lists those that are.
    """
    for name in architectures or ():
        if name in DSPARK_DRAFT_REGISTRY:
            return DSPARK_DRAFT_REGISTRY[name]
    known = ", ".join(DSPARK_DRAFT_REGISTRY)
    raise ValueError(f"no draft is registered for a target of type {list(architectures or ())}: known are {known}")


def resolve_draft_class(architectures: Sequence[str] | None) -> type[DSparkDraft]:
    """Find the draft class that a draft's own `architectures` name.

    Raises:
        ValueError: no such class; the line lists those there are.
    """
    classes = {spec.model_class.__name__: spec.model_class for spec in DSPARK_DRAFT_REGISTRY.values()}
    for name in architectures or ():
        if name in classes:
            return classes[name]
    raise ValueError(f"no draft class is named {list(architectures or ())}: known are {', '.join(sorted(classes))}")


def build_draft_config(target_config: PretrainedConfig, model_args: Any) -> PretrainedConfig:
    """Build the draft config for a target of any registered family.

    Args:
        target_config: the target's Hugging Face config; its architectures decide, else its model_type.
        model_args: mapping or object with the fields of `DraftArgs`.

    Raises:
        ValueError: an unregistered target, or wrong model_args.
    """
    names = [*(target_config.architectures or ()), target_config.model_type]
    return resolve_dspark_draft_spec(names).build_config(target_config, model_args)


def build_draft_model(target_config: PretrainedConfig, **model_args: Any) -> DSparkDraft:
    """Build the draft, freshly initialised in fp32, for a target of any registered family.

    Args:
        target_config: the target's Hugging Face config.
        **model_args: fields of `DraftArgs`; mask_token_id is required.

    Raises:
        ValueError: an unregistered target, or wrong model_args.
    """
    names = [*(target_config.architectures or ()), target_config.model_type]
    spec = resolve_dspark_draft_spec(names)
    return spec.model_class(spec.build_config(target_config, model_args))

"""Which draft serves which target."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.deepseek_v4 import DEEPSEEK_V4
from dspark_lightning.drafts.gemma4 import GEMMA4
from dspark_lightning.drafts.glm_5_2 import GLM_5_2
from dspark_lightning.drafts.kimi_k3 import KIMI_K3
from dspark_lightning.drafts.minimax_m3 import MINIMAX_M3
from dspark_lightning.drafts.qwen3 import QWEN3
from dspark_lightning.drafts.spec import DraftSpec

DSPARK_DRAFT_REGISTRY: dict[str, DraftSpec] = {}
"""Families by the target's architecture and by its model_type; filled by `register_draft_family`."""


def register_draft_family(spec: DraftSpec) -> None:
    """Make a family known: its targets are then served everywhere, and its exported drafts can be loaded.

    Args:
        spec: the family.

    Raises:
        ValueError: another family already serves one of its targets.
    """
    names = (*spec.architectures, *spec.model_types)
    for name in names:
        known = DSPARK_DRAFT_REGISTRY.get(name, spec)
        if known is not spec:
            raise ValueError(f"{name!r} is already served by {known.model_class.__name__}: a target has one family")
    DSPARK_DRAFT_REGISTRY.update(dict.fromkeys(names, spec))


for family in (QWEN3, GEMMA4, DEEPSEEK_V4, GLM_5_2, KIMI_K3, MINIMAX_M3):
    register_draft_family(family)


def resolve_dspark_draft_spec(architectures: Sequence[str] | None) -> DraftSpec:
    """Find the draft for a target.

    Args:
        architectures: of the target's config, or model types; the first that is registered decides.

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

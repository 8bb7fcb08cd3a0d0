"""A draft as a run begins with it."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from transformers import PretrainedConfig

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.spec import DraftSpec
from dspark_lightning.pretrained import load_draft_weights


def new_draft(
    spec: DraftSpec,
    config: PretrainedConfig,
    embed_tokens: nn.Module,
    lm_head: nn.Module,
    hparams: Mapping[str, Any],
) -> DSparkDraft:
    """Build a draft on the target's embedding and head.

    Args:
        spec: of its family.
        config: of the draft.
        embed_tokens: the target's; the draft shares its memory.
        lm_head: the target's, likewise.
        hparams: of the module: seed, draft_init, attention, activation_checkpointing, torch_compile.

    Raises:
        ValueError: `draft_init` cannot be read or is a draft of another kind.
    """
    with torch.random.fork_rng():  # the initial weights follow from `seed` alone, on every rank
        torch.manual_seed(hparams["seed"])
        draft = spec.model_class(config)
    draft.initialize_embeddings_and_head(embed_tokens=embed_tokens, lm_head=lm_head)
    if hparams["draft_init"] is not None:
        fresh = load_draft_weights(draft, hparams["draft_init"])
        if fresh:
            rank_zero_info(f"{hparams['draft_init']} has no {' and no '.join(fresh)}: new here, freshly initialised")
    draft.attention = hparams["attention"]
    if hparams["activation_checkpointing"]:
        draft.checkpoint_activations()
    if hparams["torch_compile"]:
        for layer in draft.layers:
            layer.compile()
    return draft

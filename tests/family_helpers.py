"""Every family with its tiny target: what the tests of the drafts share."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.target import HFDSparkTargetModel
from helpers import seeded
from tiny_target import build_tiny_target

# A tiny target for each family, and the name of its draft.
FAMILIES = {
    "qwen3": "Qwen3DSparkModel",
    "gemma4": "Gemma4DSparkModel",
    "deepseek_v4": "DeepseekV4DSparkModel",
    "glm_moe_dsa": "Glm5_2DSparkModel",
    "kimi_linear": "KimiK3DSparkModel",
    "minimax_m3_vl": "MiniMaxM3DSparkModel",
}
# Other targets that these drafts serve.
VARIANTS = {
    "qwen3_moe": "Qwen3DSparkModel",
    "gemma4_noeq": "Gemma4DSparkModel",
    "gemma4_unified": "Gemma4DSparkModel",
    "minimax_m3_text": "MiniMaxM3DSparkModel",
}
ARGS = {"mask_token_id": 5, "num_draft_layers": 2, "block_size": 4, "num_anchors": 6, "markov_rank": 8}
LOSS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}


def build_pair(family: str, **changes: Any) -> tuple[HFDSparkTargetModel, DSparkDraft]:
    """A tiny target and a draft for it that has its embedding and head, the same for the same arguments."""
    model: PreTrainedModel = build_tiny_target(family)
    with seeded(1):
        draft = build_draft_model(model.config, **{**ARGS, **changes})
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    draft.initialize_embeddings_and_head(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    return target, draft


def shake(draft: DSparkDraft) -> None:
    """Move every trainable weight away from its start, so that no zero or one hides a mistake."""
    with seeded(2), torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def token_ids(rows: int = 2, length: int = 32) -> Tensor:
    """Random ids that are neither special nor placeholders of images."""
    with seeded(3):
        return torch.randint(6, 240, (rows, length))

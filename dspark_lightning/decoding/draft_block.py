"""One block of a draft while it decodes.

Shapes: n new context tokens, F feature layers, H hidden size, K block size.
"""

from typing import cast

import torch
from torch import Tensor

from dspark_lightning.anchors import create_noise_embed, create_position_ids
from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.base import DSparkDraft


def draft_block(
    draft: DSparkDraft,
    anchor: Tensor,  # int64 [1]
    position: int,
    features: Tensor,  # [1, n, F*H]
    attention: BlockAttention,
) -> Tensor:
    """Run the draft's layers over the block behind one anchor of one row.

    Args:
        draft: on the device of the features.
        anchor: the last token.
        position: of the anchor.
        features: the target's, of the last n tokens before the anchor: those that are new since the last block.
        attention: remembers the context before them.

    Returns:
        normed block states [1, K, H].
    """
    device, dtype = features.device, draft.fc.weight.dtype
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    noise = create_noise_embed(
        draft.embed_tokens, anchor.unsqueeze(0), first, first == 0, draft.mask_token_id, draft.block_size
    )
    context = draft.hidden_norm(draft.fc(features.to(dtype)))
    positions = create_position_ids(first + position, draft.block_size)
    context_positions = torch.arange(position - features.shape[1], position, device=device).unsqueeze(0)
    hidden = draft.forward_backbone(noise.to(dtype), context, positions, context_positions, attention)
    return cast(Tensor, draft.norm(hidden))

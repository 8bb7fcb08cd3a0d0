"""What a draft's forward pass hands to the loss.

Shapes: B samples, N anchors (blocks), K block size, V vocabulary.
"""

from typing import NamedTuple

from torch import Tensor


class DSparkForwardOutput(NamedTuple):
    """Logits, labels and masks of one training forward pass.

    Slots of dropped blocks (`block_keep_mask` off) and slots with `eval_mask` off hold free values: read neither.
    """

    draft_logits: Tensor  # [B, N, K, V], Markov bias included
    target_ids: Tensor  # [B, N, K] int64, the label of every slot
    eval_mask: Tensor  # [B, N, K] bool, slots that count
    block_keep_mask: Tensor  # [B, N] bool, blocks that stand for a real anchor
    confidence_pred: Tensor | None  # [B, N, K] fp32 logit of "this slot's token will be accepted"
    aligned_target_logits: Tensor | None  # [B, N, K, V], the teacher's logits of the same slots

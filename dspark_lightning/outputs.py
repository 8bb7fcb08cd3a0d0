"""What a draft's forward pass hands to the loss.

Shapes: B samples, S sequence length, N anchors (blocks), K block size, H hidden size, V vocabulary, r Markov rank.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from dspark_lightning.slots import SlotPlan

OutputKind = Literal["logits", "hidden"]
"""Forms of a draft's output: `DSparkForwardOutput` or `DSparkHiddenOutput`."""


class DSparkForwardOutput(NamedTuple):
    """Logits, labels and masks of one training forward pass.

    Slots of dropped blocks (`block_keep_mask` off) and slots with `eval_mask` off hold free values: read neither.

    Attributes:
        draft_logits: [B, N, K, V], Markov bias included.
        target_ids: int64 [B, N, K], the label of every slot.
        eval_mask: bool [B, N, K], slots that count.
        block_keep_mask: bool [B, N], blocks that stand for a real anchor.
        confidence_pred: fp32 [B, N, K], logit of "this slot's token will be accepted"; None without a confidence head.
        aligned_target_logits: [B, N, K, V], the teacher's logits of the same slots; None without a teacher.
        block_weights: fp32 [B, N], factor of the block's slots in the loss; None for 1.
    """

    draft_logits: Tensor
    target_ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    confidence_pred: Tensor | None
    aligned_target_logits: Tensor | None
    block_weights: Tensor | None = None


class DSparkHiddenOutput(NamedTuple):
    """The same before the projection to the vocabulary; `compute_dspark_loss` projects in chunks.

    Draft logits are softcap(hidden @ head.T) + latents @ markov_w2.T, teacher logits softcap(teacher_hidden @ head.T).
    """

    hidden: Tensor  # [B, N, K, H], normed backbone states
    latents: Tensor | None  # [B, N, K, r], None without a Markov head
    teacher_hidden: Tensor | None  # [B, S, H], after the target's final norm; None without a teacher
    plan: SlotPlan  # which slots are projected, and with which teacher positions
    head: Tensor  # [V, H], weight of lm_head
    markov_w2: Tensor | None  # [V, r]
    softcap: float | None  # logits are softcap * tanh(logits / softcap)
    target_ids: Tensor  # [B, N, K] int64
    eval_mask: Tensor  # [B, N, K] bool
    block_keep_mask: Tensor  # [B, N] bool
    confidence_pred: Tensor | None  # [B, N, K] fp32
    block_weights: Tensor | None = None  # [B, N] fp32

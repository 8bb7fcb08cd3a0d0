"""The plainly written training step that the package is measured against.

Every block token of every row, dummies included, attends to all keys under one dense mask; every slot is projected to
the vocabulary, for draft and teacher, and the losses are taken from these logits. The total variation is taken in
chunks that the backward pass computes again, as trainers do to keep their memory in bounds.
Shapes: B samples, S sequence length, N anchors, K block size, Q = N*K, H hidden size, D head dim, V vocabulary, r rank.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from dspark_lightning.anchors import block_label_indices, build_eval_mask, create_noise_embed, create_position_ids
from dspark_lightning.attention import block_visibility

TV_CHUNK = 256
"""Slots whose probabilities exist at a time."""


class DenseOutput(NamedTuple):
    """What the loss reads of the draft, for all slots."""

    hidden: Tensor  # [B, N, K, H], normed
    latents: Tensor  # [B, N, K, r]
    confidence: Tensor  # [B, N, K]
    teacher_hidden: Tensor  # [B, S, H]
    teacher_positions: Tensor  # [B, N, K]
    target_ids: Tensor  # [B, N, K]
    eval_mask: Tensor  # [B, N, K]


def dense_draft(draft: Any, batch: dict[str, Tensor]) -> DenseOutput:
    """Run a Qwen3 draft with a vanilla Markov head over all B x Q block tokens.

    Args:
        draft: a `Qwen3DSparkModel`, of which only the modules are used.
        batch: the arguments of its forward pass, all on its device.
    """
    input_ids, anchors, keep = (batch[name] for name in ("input_ids", "anchor_positions", "block_keep_mask"))
    seq_len, grid = input_ids.shape[1], (anchors.shape[1], draft.block_size)
    context = draft.hidden_norm(draft.fc(batch["target_hidden_states"]))
    hidden = create_noise_embed(draft.embed_tokens, input_ids, anchors, keep, draft.mask_token_id, draft.block_size)
    context_positions = torch.arange(seq_len, device=input_ids.device).expand(len(input_ids), -1)
    positions = torch.cat([context_positions, create_position_ids(anchors, draft.block_size)], dim=1)
    rope = draft.rotary_emb(hidden, positions)
    visible = block_visibility(seq_len, anchors, keep, draft.block_size)
    for layer in draft.layers:
        hidden = hidden + _attend(layer.self_attn, layer.input_layernorm(hidden), context, rope, visible)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    hidden = draft.norm(hidden).unflatten(1, grid)
    labels, safe_labels = block_label_indices(anchors, draft.block_size, seq_len)
    tokens = input_ids.gather(1, torch.cat([anchors.unsqueeze(-1), safe_labels], dim=-1).flatten(1))
    tokens = tokens.view(len(input_ids), grid[0], grid[1] + 1)
    return DenseOutput(
        hidden=hidden,
        latents=draft.markov_head.markov_w1(tokens[..., :-1]),
        confidence=draft.predict_confidence_step(hidden, tokens[..., :-1]),
        teacher_hidden=batch["target_last_hidden_states"],
        teacher_positions=safe_labels - 1,
        target_ids=tokens[..., 1:],
        eval_mask=build_eval_mask(seq_len, batch["loss_mask"], labels, safe_labels, keep),
    )


def _attend(
    attention: Any,
    hidden: Tensor,  # [B, Q, H]
    context: Tensor,  # [B, S, H]
    rope: tuple[Tensor, Tensor],  # cos and sin [B, S+Q, D]
    visible: Tensor,  # bool [B, 1, Q, S+Q]
) -> Tensor:
    """Returns [B, Q, H]."""
    states = torch.cat([context, hidden], dim=1)
    query, key, value = (
        projection(x).unflatten(-1, (-1, attention.head_dim))
        for projection, x in ((attention.q_proj, hidden), (attention.k_proj, states), (attention.v_proj, states))
    )
    query = _rotate(attention.q_norm(query), *(table[:, context.shape[1] :] for table in rope))
    key = _rotate(attention.k_norm(key), *rope)
    attended = dense_attention(query, key, value.transpose(1, 2), visible)
    return cast(Tensor, attention.o_proj(attended.transpose(1, 2).flatten(2)))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [B, L, heads, D]. Returns [B, heads, L, D]."""
    states = states.transpose(1, 2)
    return cast(Tensor, states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attend from [B, heads, Q, D] to [B, kv_heads, S+Q, D] under the mask [B, 1, Q, S+Q]."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=grouped)


def dense_loss(
    outputs: DenseOutput,
    head: Tensor,  # [V, H]
    markov_w2: Tensor,  # [V, r]
    loss_decay_gamma: float,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
) -> Tensor:
    """Compute the value of `compute_dspark_loss` from the logits [B*Q, V] of all slots."""
    logits = F.linear(outputs.hidden.flatten(0, 2), head) + F.linear(outputs.latents.flatten(0, 2), markov_w2)
    with torch.no_grad():
        index = outputs.teacher_positions.flatten(1).unsqueeze(-1).expand(-1, -1, head.shape[1])
        teacher_logits = F.linear(outputs.teacher_hidden.gather(1, index).flatten(0, 1), head)
    ce = F.cross_entropy(logits.float(), outputs.target_ids.flatten(), reduction="none")
    chunks = zip(logits.split(TV_CHUNK), teacher_logits.split(TV_CHUNK), strict=True)
    tv = torch.cat([checkpoint(_total_variation, *chunk, use_reentrant=False) for chunk in chunks])
    acceptance = (1 - tv.detach() / 2).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(outputs.confidence.flatten().float(), acceptance, reduction="none")
    slots = torch.arange(outputs.eval_mask.shape[-1], device=head.device)
    weight = (outputs.eval_mask * torch.exp(-slots / loss_decay_gamma)).flatten()
    losses = ce_loss_alpha * ce + l1_loss_alpha * tv + confidence_head_alpha * bce
    return (weight * losses).sum() / (weight.sum() + 1e-6)


def _total_variation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    probs, teacher = torch.softmax(logits.float(), dim=-1), torch.softmax(teacher_logits.float(), dim=-1)
    return (probs - teacher).abs().sum(dim=-1)

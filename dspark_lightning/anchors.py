"""Anchors: where blocks start, what they predict, and which slots count.

Shapes: B samples, S sequence length, N anchors, K block size, H hidden size.
Packed rows hold several documents; `doc_remaining[i]` is the number of tokens that follow i in its document.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def row_generator(seed: int, epoch: int, row_id: int) -> torch.Generator:
    """Random stream of one row in one epoch; batch composition, rank and resume do not change it."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{row_id}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def build_anchor_candidate_mask(
    seq_len: int,
    loss_mask: Tensor,
    doc_remaining: Tensor | None = None,
) -> Tensor:
    """Mark the positions a block may start from.

    Position i qualifies when i and i + 1 are both supervised, and i + 1 belongs to the same document.

    Args:
        seq_len: S.
        loss_mask: supervised positions, [B, S].
        doc_remaining: tokens left in the document, [B, S], for packed rows.

    Returns:
        bool [B, S-1].
    """
    supervised = loss_mask[:, :seq_len].bool()
    candidates = supervised[:, :-1] & supervised[:, 1:]
    if doc_remaining is not None:
        candidates = candidates & (doc_remaining[:, : seq_len - 1] >= 1)
    return candidates


def sample_anchor_positions(
    seq_len: int,
    loss_mask: Tensor,
    num_anchors: int,
    device: torch.device | str,
    doc_remaining: Tensor | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw up to `num_anchors` candidates per row, uniformly and without replacement.

    A row's draw depends on its candidates and its generator alone, not on padding or on its neighbours.

    Args:
        seq_len: S.
        loss_mask: supervised positions, [B, S].
        num_anchors: N.
        device: where the result goes.
        doc_remaining: tokens left in the document, [B, S], for packed rows.
        generators: one CPU generator per row; None draws from torch's global CPU generator.

    Returns:
        positions [B, N] int64, ascending, and keep [B, N] bool. Rows with fewer candidates are filled up with
        dummies: position 0, keep False.

    Raises:
        ValueError: the number of generators differs from the number of rows.
    """
    candidates = build_anchor_candidate_mask(seq_len, loss_mask, doc_remaining).cpu()
    batch_size = candidates.shape[0]
    if generators is not None and len(generators) != batch_size:
        raise ValueError(f"generators must hold one generator for each of the {batch_size} rows, got {len(generators)}")
    positions = torch.zeros(batch_size, num_anchors, dtype=torch.int64)
    keep = torch.zeros(batch_size, num_anchors, dtype=torch.bool)
    for row in range(batch_size):
        choices = candidates[row].nonzero().squeeze(-1)
        generator = generators[row] if generators is not None else None
        chosen = choices[torch.randperm(choices.numel(), generator=generator)[:num_anchors]]
        positions[row, : chosen.numel()] = chosen.sort().values
        keep[row, : chosen.numel()] = True
    return positions.to(device), keep.to(device)


def block_label_indices(anchor_positions: Tensor, block_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Index of the token that each slot predicts: anchor + slot + 1.

    Returns:
        indices [B, N, K], which may run past the sequence, and the same clamped into it for gathering.
    """
    offsets = torch.arange(1, block_size + 1, device=anchor_positions.device)
    indices = anchor_positions.unsqueeze(-1) + offsets
    return indices, indices.clamp(max=seq_len - 1)


def build_eval_mask(
    seq_len: int,
    loss_mask: Tensor,
    label_indices: Tensor,
    safe_label_indices: Tensor,
    block_keep_mask: Tensor,
    doc_remaining: Tensor | None = None,
    anchor_positions: Tensor | None = None,
) -> Tensor:
    """Mark the slots that count: a contiguous supervised prefix of every kept block.

    A slot counts while its label lies inside the sequence and inside the anchor's document, and the labels of
    all slots up to it are supervised.

    Args:
        seq_len: S.
        loss_mask: supervised positions, [B, S].
        label_indices: of each slot's label, [B, N, K]; may run past the sequence.
        safe_label_indices: the same clamped into it.
        block_keep_mask: blocks that stand for a real anchor, [B, N].
        doc_remaining: tokens left in the document, [B, S], for packed rows.
        anchor_positions: [B, N]; needed with doc_remaining.

    Returns:
        bool [B, N, K].

    Raises:
        ValueError: `doc_remaining` without `anchor_positions`.
    """
    labels_supervised = _gather_rows(loss_mask.bool(), safe_label_indices)
    valid = labels_supervised & (label_indices < seq_len) & block_keep_mask.unsqueeze(-1)
    if doc_remaining is not None:
        if anchor_positions is None:
            raise ValueError("anchor_positions must be given together with doc_remaining, got None")
        slots = torch.arange(1, label_indices.shape[-1] + 1, device=label_indices.device)
        valid = valid & (slots <= _gather_rows(doc_remaining, anchor_positions).unsqueeze(-1))
    return valid.long().cumprod(dim=-1).bool()


def context_doc_ids(seq_lens: Tensor, seq_len: int, device: torch.device | str) -> Tensor:
    """Number the documents of packed rows.

    Args:
        seq_lens: lengths of the documents in order, zero padded, [B, M].
        seq_len: S.
        device: where the result goes.

    Returns:
        int64 [B, S], 0 for the first document; padding behind the last document gets an id of its own.
    """
    ends = seq_lens.to(device).cumsum(dim=-1)  # [B, M]
    positions = torch.arange(seq_len, device=device)
    return (positions[None, :, None] >= ends[:, None, :]).sum(dim=-1).clamp(max=ends.shape[-1])


def create_noise_embed(
    embed_tokens: nn.Module,
    input_ids: Tensor,
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    mask_token_id: int,
    block_size: int,
) -> Tensor:
    """Embed the block input: the anchor token in slot 0, the mask token elsewhere and in all of a dummy block.

    Args:
        embed_tokens: the embedding, V to H.
        input_ids: [B, S].
        anchor_positions: [B, N].
        block_keep_mask: blocks that stand for a real anchor, [B, N].
        mask_token_id: token of the slots to predict.
        block_size: K.

    Returns:
        [B, N*K, H].
    """
    batch_size, num_anchors = anchor_positions.shape
    block_ids = input_ids.new_full((batch_size, num_anchors, block_size), mask_token_id)
    anchor_ids = input_ids.gather(1, anchor_positions)
    block_ids[..., 0] = torch.where(block_keep_mask, anchor_ids, mask_token_id)
    embedded: Tensor = embed_tokens(block_ids.flatten(1))
    return embedded


def create_position_ids(
    anchor_positions: Tensor,
    block_size: int,
    context_position_ids: Tensor | None = None,
) -> Tensor:
    """RoPE positions of the block tokens: the anchor's position (inside its document when packed) plus the slot.

    Args:
        anchor_positions: [B, N].
        block_size: K.
        context_position_ids: positions of the row's tokens, [B, S]; None counts from 0.

    Returns:
        int64 [B, N*K].
    """
    starts = anchor_positions
    if context_position_ids is not None:
        starts = context_position_ids.gather(1, anchor_positions)
    offsets = torch.arange(block_size, device=anchor_positions.device)
    return (starts.unsqueeze(-1) + offsets).flatten(1)


def _gather_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Pick from values [B, S] at indices [B, ...]."""
    return values.gather(1, indices.flatten(1)).view(indices.shape)

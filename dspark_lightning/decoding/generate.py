"""Lossless speculative decoding: the draft proposes a block, the target verifies it in one pass (paper section 2).

Shapes: B rows, S prompt length, L new tokens, K block size, F feature layers, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.decoding.settings import check_decoding, check_threshold
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel


class SpeculativeOutput(NamedTuple):
    """What was generated, and how.

    Attributes:
        sequences: int64 [B, S + L], the prompt as it was given, then the new tokens, padded with the pad token.
        accepted_lengths: of each row, drafted tokens that each round accepted, none behind a stop token.
    """

    sequences: Tensor
    accepted_lengths: list[list[int]]


@torch.no_grad()
def speculative_generate(
    target: PreTrainedModel,
    draft: DSparkDraft,
    input_ids: Tensor,  # [B, S]
    *,
    attention_mask: Tensor | None = None,  # [B, S]
    max_new_tokens: int,
    temperature: float = 0.0,
    confidence_threshold: float = 0.0,
    stop_token_ids: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> SpeculativeOutput:
    """Continue prompts as the target alone would, only faster.

    Temperature 0 gives the target's own greedy tokens; otherwise tokens are distributed as the target's at that
    temperature. Rows are decoded one after the other, each with caches of its own: that is exact for every family.

    Args:
        target: a causal LM, on the device of input_ids; it is put into eval mode and frozen.
        draft: trained for it; it is put into eval mode.
        input_ids: prompts.
        attention_mask: 0 = padding, on either side.
        max_new_tokens: of each row, L at most.
        temperature: 0 is greedy.
        confidence_threshold: a block is cut before the first token whose predicted acceptance is lower; 0 never cuts.
        stop_token_ids: a row ends with the first of these; None takes the target's end-of-sequence tokens.
        generator: source of randomness, on the device of input_ids.

    Raises:
        ValueError: an argument out of range, an empty prompt, or a threshold for a draft without a confidence head.
    """
    _check_types(target, draft, input_ids)
    check_decoding(max_new_tokens, temperature, confidence_threshold)
    check_threshold(draft, confidence_threshold)
    stops = set(end_tokens(target) if stop_token_ids is None else stop_token_ids)
    captured = HFDSparkTargetModel(target, draft.target_layer_ids)
    cast(nn.Module, draft).eval()
    rows, accepted = [], []
    for row in range(len(input_ids)):
        prompt = input_ids[row] if attention_mask is None else input_ids[row][attention_mask[row].bool()]
        if not len(prompt):
            raise ValueError(f"the prompt of row {row} is empty: there must be at least one token")
        decoded = DecodedRow(captured, draft, prompt, temperature, confidence_threshold, generator)
        decoded.run(max_new_tokens, stops)
        rows.append(torch.tensor(decoded.tokens, dtype=torch.int64, device=input_ids.device))
        accepted.append([each.accepted for each in decoded.rounds])
    pad = getattr(target.config.get_text_config(), "pad_token_id", None) or 0
    new = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    return SpeculativeOutput(torch.cat([input_ids, new], dim=1), accepted)


def _check_types(target: object, draft: object, input_ids: object) -> None:
    for name, value, kind in (("target", target, PreTrainedModel), ("draft", draft, DSparkDraft)):
        if not isinstance(value, kind) or (name == "target" and isinstance(value, DSparkDraft)):
            raise ValueError(
                f"{name} must be a {kind.__name__}, got a {type(value).__name__}: target, draft, input_ids"
            )
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor [rows, tokens], got {shape}")


def end_tokens(target: PreTrainedModel) -> list[int]:
    """The tokens with which a target ends its answers."""
    end = target.generation_config.eos_token_id if target.generation_config else None
    if end is None:
        end = target.config.get_text_config().eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)

"""Lossless speculative decoding: the draft proposes a block, the target verifies it in one pass (paper section 2).

Shapes: B rows, S prompt length, L new tokens, K block size, F feature layers, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark_lightning.decoding.cached_target import CachedTarget
from dspark_lightning.decoding.context_memory import ContextMemory
from dspark_lightning.decoding.draft_block import draft_block
from dspark_lightning.decoding.sampling import logits_to_probs, sample_tokens
from dspark_lightning.decoding.verify import verify_draft
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel


class SpeculativeOutput(NamedTuple):
    """What was generated, and how."""

    sequences: Tensor  # int64 [B, S + L], the prompt as it was given, then the new tokens, padded with the pad token
    accepted_lengths: list[list[int]]  # of each row, the drafted tokens that each round accepted


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
    _check(draft, max_new_tokens, temperature, confidence_threshold)
    stops = set(_end_tokens(target) if stop_token_ids is None else stop_token_ids)
    captured = HFDSparkTargetModel(target, draft.target_layer_ids)
    cast(nn.Module, draft).eval()
    rows, accepted = [], []
    for row in range(len(input_ids)):
        prompt = input_ids[row] if attention_mask is None else input_ids[row][attention_mask[row].bool()]
        if not len(prompt):
            raise ValueError(f"the prompt of row {row} is empty: there must be at least one token")
        decoding = _Row(captured, draft, prompt, temperature, confidence_threshold, generator)
        decoding.run(max_new_tokens, stops)
        rows.append(torch.tensor(decoding.tokens, dtype=torch.int64, device=input_ids.device))
        accepted.append(decoding.accepted)
    pad = getattr(target.config.get_text_config(), "pad_token_id", None) or 0
    new = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    return SpeculativeOutput(torch.cat([input_ids, new], dim=1), accepted)


class _Row:
    """One prompt and what follows it.

    Args:
        target: captures the draft's features.
        draft: proposes.
        prompt: [S], without padding.
        temperature: of both.
        threshold: see `speculative_generate`.
        generator: source of randomness.
    """

    def __init__(
        self,
        target: HFDSparkTargetModel,
        draft: DSparkDraft,
        prompt: Tensor,
        temperature: float,
        threshold: float,
        generator: torch.Generator | None,
    ) -> None:
        self.draft, self.temperature, self.threshold, self.generator = draft, temperature, threshold, generator
        self.target, self.memory = CachedTarget(target), ContextMemory()
        self.features, hidden = self.target.feed(prompt)  # of the tokens that the draft has not seen yet
        self.anchor = sample_tokens(self.target.logits(hidden[:, -1]), temperature, generator)  # [1]
        self.position = len(prompt)  # of the anchor
        self.tokens = [int(self.anchor)]
        self.accepted: list[int] = []

    def run(self, max_new_tokens: int, stops: set[int]) -> None:
        """Go on until a stop token, or until there are `max_new_tokens`."""
        while len(self.tokens) < max_new_tokens and self.tokens[-1] not in stops:
            new = self.round(max_new_tokens - len(self.tokens))
            end = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))
            self.tokens += new[:end]

    def round(self, room: int) -> list[int]:
        """Draft a block, verify it, and return the tokens gained, at most `room`."""
        tokens, probs = self._propose(room - 1)
        self.features, hidden = self.target.feed_on_trial(torch.cat([self.anchor, tokens]))
        target_probs = logits_to_probs(self.target.logits(hidden[0]), self.temperature)
        count, following = verify_draft(tokens, probs, target_probs, self.generator)
        self.target.keep(1 + count)
        self.features = self.features[:, : 1 + count]
        self.position += 1 + count
        self.anchor = following
        self.accepted.append(count)
        return [*tokens[:count].tolist(), int(following)]

    def _propose(self, most: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] behind the anchor and the distributions [n, V] they were drawn from."""
        self.memory.next_block()
        hidden = draft_block(self.draft, self.anchor, self.position, self.features, self.memory)
        logits = self.draft.compute_logits(hidden)
        tokens, logits = self.draft.sample_draft_tokens(logits, self.anchor, self.temperature, hidden, self.generator)
        count = min(tokens.shape[1], most)
        if self.threshold > 0:
            previous = torch.cat([self.anchor.unsqueeze(0), tokens[:, :-1]], dim=1)
            confidence = self.draft.predict_confidence_step(hidden, previous)
            assert confidence is not None  # _check saw to it
            sure = torch.sigmoid(confidence[0]) >= self.threshold
            count = min(count, int(sure.long().cumprod(0).sum()))
        return tokens[0, :count], logits_to_probs(logits[0, :count], self.temperature)


def _check(draft: DSparkDraft, max_new_tokens: int, temperature: float, confidence_threshold: float) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must lie in 0..1, got {confidence_threshold}")
    if confidence_threshold and not draft.enable_confidence_head:
        raise ValueError(f"confidence_threshold {confidence_threshold} needs a draft with a confidence head")


def _end_tokens(target: PreTrainedModel) -> list[int]:
    end = target.generation_config.eos_token_id if target.generation_config else None
    if end is None:
        end = target.config.get_text_config().eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)

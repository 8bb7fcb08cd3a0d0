"""What `decode.py` compares: one round of speculative decoding and its parts, one plain step, and the bytes of both.

Shapes: C context length, K block size, H hidden size, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from benchmarks.measure import Run
from dspark_lightning.decoding.cached_target import CachedTarget, cache_argument
from dspark_lightning.decoding.draft_block import draft_block
from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.decoding.sampling import sample_tokens
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel

READ_BYTES = 2**28
"""Of the fp32 numbers that are added up to see how fast this machine reads."""


class PlainStep:
    """One token through the whole target with its cache, as anyone would write it with transformers."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        cache = DynamicCache(config=model.config.get_text_config())
        self.model, self.options = cast(Any, model), {cache_argument(model): cache, "use_cache": True}
        self.token = prompt.unsqueeze(0)
        self()

    @torch.inference_mode()
    def __call__(self) -> None:
        """Feed the last token, and take the likeliest next one."""
        logits = self.model(input_ids=self.token, logits_to_keep=1, **self.options).logits
        self.token = logits[:, -1].argmax(dim=-1, keepdim=True)


class LeanStep:
    """The same as `decode_plainly` does it."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        last = model.config.get_text_config().num_hidden_layers - 1
        self.target, self.token = CachedTarget(HFDSparkTargetModel(model, [last])), prompt
        self()

    @torch.no_grad()
    def __call__(self) -> None:
        """Feed the last token, and take the likeliest next one."""
        _, hidden = self.target.feed(self.token)
        self.token = sample_tokens(self.target.logits(hidden[:, -1]), 0.0)


class WholeRound:
    """A block drafted, verified and judged: what `speculative_generate` repeats."""

    def __init__(self, target: HFDSparkTargetModel, draft: DSparkDraft, prompt: Tensor) -> None:
        self.row, self.most = DecodedRow(target, draft, prompt, temperature=0.0), draft.block_size + 1

    def __call__(self) -> None:
        """Decode one round, however much of it is accepted."""
        self.row.advance(self.most, stops=set())


class RoundParts:
    """The parts of a round, one call each; `runs` names them. One token of each block stays."""

    def __init__(self, target: HFDSparkTargetModel, draft: DSparkDraft, prompt: Tensor) -> None:
        self.draft, self.row = draft, DecodedRow(target, draft, prompt, temperature=0.0)
        self.hidden = self.logits = self.states = torch.empty(0)
        self.tokens = self.row.anchor
        self.runs: dict[str, Run] = {
            "draft layers": self._draft_layers,
            "draft head": self._draft_head,
            "Markov steps": self._markov_steps,
            "target layers": self._target_layers,
            "target head": self._target_head,
        }

    @torch.no_grad()
    def _draft_layers(self) -> None:
        row = self.row
        row.memory.next_block()
        self.hidden = draft_block(self.draft, row.anchor, row.position, row.features, row.memory)
        row.features, row.position = row.features[:, :1], row.position + 1

    @torch.no_grad()
    def _draft_head(self) -> None:
        self.logits = self.draft.compute_logits(self.hidden)

    @torch.no_grad()
    def _markov_steps(self) -> None:
        tokens, _ = self.draft.sample_draft_tokens(self.logits, self.row.anchor, 0.0, self.hidden)
        self.tokens = torch.cat([self.row.anchor, tokens[0]])

    def _target_layers(self) -> None:
        _, self.states = self.row.target.feed_on_trial(self.tokens)
        self.row.target.keep(1)

    def _target_head(self) -> None:
        self.row.target.logits(self.states[0])


def read() -> Run:
    """A plain read of memory: the sum of many numbers."""
    numbers = torch.ones(READ_BYTES // 4)
    return lambda: numbers.sum()


def plain_bytes(target: HFDSparkTargetModel, context: int) -> int:
    """What one plain step has to read: layers and head once, keys and values of the context once."""
    decoder = target.decoder
    layers = _size(cast(nn.Module, decoder.layers).parameters()) + _size(target.lm_head.parameters())
    return layers + context * _bytes_per_token(target.model.config.get_text_config(), target.model.dtype)


def round_bytes(target: HFDSparkTargetModel, draft: DSparkDraft, context: int) -> int:
    """What one round has to read: a plain step's bytes, the draft's, and those of each Markov step K times."""
    once = _size(draft.fc.parameters()) + _size(draft.layers.parameters()) + _size(draft.lm_head.parameters())
    cache = context * _bytes_per_token(draft.config, draft.dtype)
    step = 0
    if draft.markov_head is not None:  # of the table W1 a step reads one row
        step = _size(draft.markov_head.parameters()) - _size(draft.markov_head.markov_w1.parameters())
    return plain_bytes(target, context) + once + cache + draft.block_size * step


def _size(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one token, with plain grouped-query attention."""
    heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize)

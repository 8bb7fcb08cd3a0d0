"""One prompt and what follows it, block by block.

Shapes: S prompt length, n proposed tokens, K block size, F feature layers, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_lightning.decoding.cached_target import CachedTarget
from dspark_lightning.decoding.context_memory import ContextMemory
from dspark_lightning.decoding.draft_block import draft_block
from dspark_lightning.decoding.sample_block import sample_block
from dspark_lightning.decoding.sampling import logits_to_probs, sample_tokens
from dspark_lightning.decoding.verify import verify_draft, verify_greedily
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.target import HFDSparkTargetModel


class Round(NamedTuple):
    """One block, drafted and verified."""

    proposed: int  # tokens behind the anchor that the target verified
    judged: int  # of these, up to and with the token that ended the row
    accepted: int  # of these
    confidence: list[float] | None  # logits of all K drafted tokens, also of those that were not proposed


class Proposal(NamedTuple):
    """What the draft puts before the target."""

    tokens: Tensor  # int64 [n]
    probs: Tensor | None  # [n, V], what they were drawn from; None at temperature 0
    confidence: Tensor | None  # [K], of all


class DecodedRow:
    """Decodes one row, with caches of its own. The first token comes with the prompt.

    Args:
        target: captures the draft's features.
        draft: proposes.
        prompt: int64 [S], without padding.
        temperature: of both.
        threshold: see `speculative_generate`.
        generator: source of randomness.
    """

    @torch.no_grad()
    def __init__(
        self,
        target: HFDSparkTargetModel,
        draft: DSparkDraft,
        prompt: Tensor,
        temperature: float,
        threshold: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.draft, self.temperature, self.threshold, self.generator = draft, temperature, threshold, generator
        self.target, self.memory = CachedTarget(target), ContextMemory()
        self.features, hidden = self.target.feed(prompt)  # of the tokens that the draft has not seen yet
        self.anchor = sample_tokens(self.target.logits(hidden[:, -1]), temperature, generator)  # [1]
        self.position = len(prompt)  # of the anchor
        self.tokens = [int(self.anchor)]
        self.rounds: list[Round] = []

    def run(self, max_new_tokens: int, stops: set[int]) -> None:
        """Go on until a stop token, or until there are `max_new_tokens`."""
        while len(self.tokens) < max_new_tokens and self.tokens[-1] not in stops:
            self.advance(max_new_tokens - len(self.tokens), stops)

    @torch.no_grad()
    def advance(self, most: int, stops: set[int]) -> None:
        """Decode one round, which adds `most` tokens at most."""
        proposal = self._propose(most - 1)
        gained = self._verify(proposal)
        end = next((i + 1 for i, token in enumerate(gained) if token in stops), len(gained))
        self.tokens += gained[:end]
        # What follows a stop token is no part of the answer, accepted or not.
        proposed, accepted = len(proposal.tokens), len(gained) - 1
        judged = end if end <= accepted else proposed
        confidence = None if proposal.confidence is None else proposal.confidence.tolist()
        self.rounds.append(Round(proposed, judged, min(accepted, end), confidence))

    def _propose(self, most: int) -> Proposal:
        """Draft a block, and cut it where it may grow too long or where the draft is unsure."""
        self.memory.next_block()
        hidden = draft_block(self.draft, self.anchor, self.position, self.features, self.memory)
        logits = self.draft.compute_logits(hidden)
        block = sample_block(self.draft.markov_head, logits, self.anchor, self.temperature, hidden, self.generator)
        tokens = block.tokens
        previous = torch.cat([self.anchor.unsqueeze(0), tokens[:, :-1]], dim=1)
        predicted = self.draft.predict_confidence_step(hidden, previous)
        confidence = None if predicted is None else predicted[0]
        count = min(tokens.shape[1], most)
        if self.threshold > 0 and confidence is not None:
            sure = torch.sigmoid(confidence) >= self.threshold
            count = min(count, int(sure.long().cumprod(0).sum()))
        return Proposal(tokens[0, :count], None if block.probs is None else block.probs[0, :count], confidence)

    def _verify(self, proposal: Proposal) -> list[int]:
        """Let the target judge the block, and return the tokens gained: those accepted, and one behind them."""
        self.features, hidden = self.target.feed_on_trial(torch.cat([self.anchor, proposal.tokens]))
        logits = self.target.logits(hidden[0])
        if proposal.probs is None:
            accepted, following = verify_greedily(proposal.tokens, logits)
        else:
            target_probs = logits_to_probs(logits, self.temperature)
            accepted, following = verify_draft(proposal.tokens, proposal.probs, target_probs, self.generator)
        # All that the loop has to know of a round comes from the device at once.
        count, *tokens, last = torch.cat([accepted.unsqueeze(0), proposal.tokens, following]).tolist()
        self.target.keep(1 + count)
        self.features = self.features[:, : 1 + count]
        self.position += 1 + count
        self.anchor = following
        return [*tokens[:count], last]

"""One prompt and what follows it, block by block.

Shapes: S prompt length, n proposed tokens, K block size, F feature layers, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_lightning.decoding.cached_target import CachedTarget
from dspark_lightning.decoding.context_memory import ContextMemory
from dspark_lightning.decoding.draft_block import draft_block
from dspark_lightning.decoding.sampling import logits_to_probs, sample_tokens
from dspark_lightning.decoding.verify import verify_draft
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
    probs: Tensor  # [n, V], what they were drawn from
    confidence: list[float] | None  # of all K


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
            proposal = self._propose(max_new_tokens - len(self.tokens) - 1)
            gained = self._verify(proposal)
            end = next((i + 1 for i, token in enumerate(gained) if token in stops), len(gained))
            self.tokens += gained[:end]
            # What follows a stop token is no part of the answer, accepted or not.
            proposed, accepted = len(proposal.tokens), len(gained) - 1
            judged = end if end <= accepted else proposed
            self.rounds.append(Round(proposed, judged, min(accepted, end), proposal.confidence))

    def _propose(self, most: int) -> Proposal:
        """Draft a block, and cut it where it may grow too long or where the draft is unsure."""
        self.memory.next_block()
        hidden = draft_block(self.draft, self.anchor, self.position, self.features, self.memory)
        logits = self.draft.compute_logits(hidden)
        tokens, logits = self.draft.sample_draft_tokens(logits, self.anchor, self.temperature, hidden, self.generator)
        previous = torch.cat([self.anchor.unsqueeze(0), tokens[:, :-1]], dim=1)
        confidence = self.draft.predict_confidence_step(hidden, previous)
        count = min(tokens.shape[1], most)
        if self.threshold > 0 and confidence is not None:
            sure = torch.sigmoid(confidence[0]) >= self.threshold
            count = min(count, int(sure.long().cumprod(0).sum()))
        known = None if confidence is None else confidence[0].tolist()
        return Proposal(tokens[0, :count], logits_to_probs(logits[0, :count], self.temperature), known)

    def _verify(self, proposal: Proposal) -> list[int]:
        """Let the target judge the block, and return the tokens gained: those accepted, and one behind them."""
        self.features, hidden = self.target.feed_on_trial(torch.cat([self.anchor, proposal.tokens]))
        target_probs = logits_to_probs(self.target.logits(hidden[0]), self.temperature)
        count, following = verify_draft(proposal.tokens, proposal.probs, target_probs, self.generator)
        self.target.keep(1 + count)
        self.features = self.features[:, : 1 + count]
        self.position += 1 + count
        self.anchor = following
        return [*proposal.tokens[:count].tolist(), int(following)]

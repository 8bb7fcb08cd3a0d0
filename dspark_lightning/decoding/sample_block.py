"""Sampling a block left to right through the Markov head.

Shapes: B rows, K block size, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_lightning.decoding.projection import project
from dspark_lightning.decoding.sampling import logits_to_probs
from dspark_lightning.heads import MARKOV_HEADS, MarkovHead, VanillaMarkov


class SampledBlock(NamedTuple):
    """Tokens, and what they were drawn from."""

    tokens: Tensor  # int64 [B, K]
    logits: Tensor  # [B, K, V], with the Markov bias
    probs: Tensor | None  # [B, K, V], fp32; None at temperature 0


@torch.no_grad()
def sample_block(
    markov: MarkovHead | None,
    base_logits: Tensor,  # [B, K, V]
    first_prev_token_ids: Tensor,  # int64 [B]
    temperature: float = 0.0,
    hidden_states: Tensor | None = None,  # [B, K, H]
    generator: torch.Generator | None = None,
) -> SampledBlock:
    """Sample each slot behind the token of the one before.

    Args:
        markov: adds a bias that depends on that token; without one all slots are drawn at once.
        base_logits: of the block, without the bias.
        first_prev_token_ids: the anchor tokens.
        temperature: 0 is greedy.
        hidden_states: normed backbone states; the gated and rnn heads need them.
        generator: source of randomness on the logits' device.

    Raises:
        ValueError: the head reads hidden_states, and there are none.
    """
    if markov is None:
        return SampledBlock(*_draw(base_logits, temperature, generator))
    if hidden_states is None and not isinstance(markov, VanillaMarkov):
        kind = next(name for name, head in MARKOV_HEADS.items() if isinstance(markov, head))
        raise ValueError(f"hidden_states must be given: the {kind} head reads them, got None")
    prev, state, slots = first_prev_token_ids, None, []
    for slot in range(base_logits.shape[1]):
        hidden = prev if hidden_states is None else hidden_states[:, slot]  # a vanilla head leaves it unread
        latent, state = markov.step(prev, hidden, state)
        slots.append(_draw(base_logits[:, slot] + project(markov.markov_w2, latent), temperature, generator))
        prev = slots[-1][0]
    tokens, logits, probs = zip(*slots, strict=True)
    return SampledBlock(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(probs, 1) if temperature else None)


def _draw(
    logits: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens for logits [..., V], the logits, and the probabilities; None where the largest logit is taken."""
    if temperature == 0:
        return logits.argmax(dim=-1), logits, None
    probs = logits_to_probs(logits, temperature)
    drawn = torch.multinomial(probs.flatten(0, -2), 1, generator=generator)
    return drawn.view(logits.shape[:-1]), logits, probs

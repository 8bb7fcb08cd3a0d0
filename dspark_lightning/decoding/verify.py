"""Speculative sampling: which drafted tokens stay, and the token behind them (paper section 2).

A token x is kept with probability min(1, q(x) / p(x)); at the first that is not, the next token is drawn from
normalise(max(q - p, 0)), behind a whole block from q. What comes out is distributed as q.
Shapes: n drafted tokens, V vocabulary.
"""

import torch
from torch import Tensor


def verify_draft(
    tokens: Tensor,  # int64 [n]
    draft_probs: Tensor,  # [n, V], p: what each token was drawn from
    target_probs: Tensor,  # [n + 1, V], q: at each token, and behind the last
    generator: torch.Generator | None = None,
) -> tuple[int, Tensor]:
    """Accept a prefix of a drafted block and draw the token behind it.

    Returns:
        the number of accepted tokens, and the next token, int64 [1].
    """
    count = len(tokens)
    slots = torch.arange(count, device=tokens.device)
    ratio = target_probs[slots, tokens] / draft_probs[slots, tokens]
    drawn = torch.rand(count, generator=generator, device=tokens.device, dtype=ratio.dtype)
    accepted = int((drawn < ratio).long().cumprod(0).sum())
    probs = target_probs[accepted]
    if accepted < count:
        residual = (probs - draft_probs[accepted]).clamp(min=0)
        # Rounding can leave nothing where both are all but equal; then q is what is left.
        probs = residual if residual.sum() > 0 else probs
    return accepted, torch.multinomial(probs, 1, generator=generator)

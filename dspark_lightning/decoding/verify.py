"""Which drafted tokens stay, and the token behind them (paper section 2).

Speculative sampling keeps a token x with probability min(1, q(x) / p(x)); at the first that is not kept, the next token
is drawn from normalise(max(q - p, 0)), behind a whole block from q. What comes out is distributed as q. At temperature
0 this is: keep what the target would say itself.
Nothing here waits for an accelerator: what was found stays on it.
Shapes: n drafted tokens, V vocabulary.
"""

import torch
from torch import Tensor


def verify_draft(
    tokens: Tensor,  # int64 [n]
    draft_probs: Tensor,  # [n, V], p: what each token was drawn from
    target_probs: Tensor,  # [n + 1, V], q: at each token, and behind the last
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of a drafted block and draw the token behind it.

    Returns:
        the number of accepted tokens, int64 [], and the next token, int64 [1].
    """
    count = len(tokens)
    slots = torch.arange(count, device=tokens.device)
    ratio = target_probs[slots, tokens] / draft_probs[slots, tokens]
    drawn = torch.rand(count, generator=generator, device=tokens.device, dtype=ratio.dtype)
    accepted = _length_of_prefix(drawn < ratio)
    probs = target_probs.index_select(0, accepted.unsqueeze(0))
    if count:
        drafted = draft_probs.index_select(0, accepted.clamp(max=count - 1).unsqueeze(0))
        residual = (probs - drafted * (accepted < count)).clamp(min=0)
        # Rounding can leave nothing where both are all but equal; then q is what is left.
        probs = torch.where(residual.sum() > 0, residual, probs)
    return accepted, torch.multinomial(probs, 1, generator=generator).squeeze(0)


def verify_greedily(
    tokens: Tensor,  # int64 [n]
    target_logits: Tensor,  # [n + 1, V], at each token, and behind the last
) -> tuple[Tensor, Tensor]:
    """`verify_draft` at temperature 0, from the logits alone."""
    best = target_logits.argmax(dim=-1)
    accepted = _length_of_prefix(best[:-1] == tokens)
    return accepted, best.index_select(0, accepted.unsqueeze(0))


def _length_of_prefix(kept: Tensor) -> Tensor:
    """How many of the first are on, int64 []."""
    return kept.long().cumprod(0).sum()

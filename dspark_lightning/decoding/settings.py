"""What decoding can be asked for."""

from dspark_lightning.drafts.base import DSparkDraft

LEAST_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave the range of their numbers."""


def check_decoding(max_new_tokens: int, temperature: float, confidence_threshold: float) -> None:
    """Check the arguments of `speculative_generate`.

    Raises:
        ValueError: one is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {temperature}")
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must lie in 0..1, got {confidence_threshold}")


def check_threshold(draft: DSparkDraft, confidence_threshold: float) -> None:
    """Check that a draft can be asked for its confidences.

    Raises:
        ValueError: there is a threshold, but no confidence head.
    """
    if confidence_threshold and not draft.enable_confidence_head:
        raise ValueError(f"confidence_threshold {confidence_threshold} needs a draft with a confidence head")

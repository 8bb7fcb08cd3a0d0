"""What decoding can be asked for."""

from transformers import PretrainedConfig

from dspark_lightning.drafts.base import DSparkDraft

LEAST_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave the range of their numbers."""


def check_decoding(max_new_tokens: int, temperature: float, confidence_threshold: float) -> None:
    """Check the arguments of `speculative_generate`.

    Raises:
        ValueError: one is out of range.
    """
    check_max_new_tokens(max_new_tokens)
    check_temperature(temperature)
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must lie in 0..1, got {confidence_threshold}")


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Check how many tokens an answer may have.

    Raises:
        ValueError: none.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")


def check_temperature(temperature: float) -> None:
    """Check a temperature.

    Raises:
        ValueError: it is negative, or so small that nothing can be divided by it.
    """
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {temperature}")


def check_positions(config: PretrainedConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Check that a prompt and its answer fit into what a target can read.

    Args:
        config: of the target.
        prompt_tokens: of the prompt.
        max_new_tokens: of the answer, at most.

    Raises:
        ValueError: they do not.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and prompt_tokens + max_new_tokens > most:
        raise ValueError(
            f"{prompt_tokens} prompt tokens and max_new_tokens {max_new_tokens} are more than the {most} positions of "
            "the target"
        )


def check_threshold(draft: DSparkDraft, confidence_threshold: float) -> None:
    """Check that a draft can be asked for its confidences.

    Raises:
        ValueError: there is a threshold, but no confidence head.
    """
    if confidence_threshold and not draft.enable_confidence_head:
        raise ValueError(f"confidence_threshold {confidence_threshold} needs a draft with a confidence head")

"""What a datamodule needs to know of the target, from its own arguments or from the module that is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Resolved arguments.

    Attributes:
        tokenizer: Folder, hub id or "embedded".
        gguf_file: Name of the GGUF file in it that holds the tokenizer, or None.
        trust_remote_code: Whether Python code found there may run.
        mask_token_id: The draft's mask token.
        min_supervised_tokens: Rows with fewer are left out.
        seed: Of the training order.
    """

    tokenizer: str
    gguf_file: str | None
    trust_remote_code: bool
    mask_token_id: int
    min_supervised_tokens: int
    seed: int


def resolve_settings(
    hparams: Mapping[str, Any],
    *,
    tokenizer: str | None,
    gguf_file: str | None,
    mask_token_id: int | None,
    min_supervised_tokens: int | None,
    seed: int | None,
) -> Settings:
    """Take from the module's hyper-parameters what is None here.

    Args:
        hparams: `target`, `gguf_file`, `trust_remote_code`, `mask_token_id`, `block_size`, `seed`; any may be missing.
        tokenizer: Default: the target; `gguf_file` then too.
        gguf_file: See `Settings`.
        mask_token_id: Must not differ from the module's.
        min_supervised_tokens: Default: twice the block_size; without one 2, the least with which a row has an anchor.
        seed: Default: the module's, else 0.

    Raises:
        ValueError: tokenizer or mask_token_id is neither here nor there, or there are two mask tokens.
    """
    if tokenizer is None:
        tokenizer, gguf_file = hparams.get("target"), gguf_file or hparams.get("gguf_file")
    if tokenizer is None:
        raise ValueError(
            "tokenizer is not set: give the folder or hub id of the target, or train a module that has one"
        )
    model_mask = hparams.get("mask_token_id", mask_token_id)
    if model_mask is None:
        raise ValueError(
            "mask_token_id is not set and has no default: give the id of a token that the data never holds"
        )
    if mask_token_id not in (None, model_mask):
        raise ValueError(
            f"mask_token_id is {mask_token_id} for the data, but {model_mask} for the model: leave it out for the data"
        )
    if min_supervised_tokens is None:
        min_supervised_tokens = 2 * hparams.get("block_size", 1)
    return Settings(
        tokenizer=str(tokenizer),
        gguf_file=gguf_file,
        trust_remote_code=bool(hparams.get("trust_remote_code", False)),
        mask_token_id=model_mask,
        min_supervised_tokens=min_supervised_tokens,
        seed=hparams.get("seed", 0) if seed is None else seed,
    )

"""Loading the target's tokenizer."""

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark_lightning.embedded import embedded_path


def load_tokenizer(name: str, gguf_file: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        name: Folder, hub id, or "embedded".
        gguf_file: Name of a GGUF file in it that holds the tokenizer.
        trust_remote_code: Whether Python code found there may run.

    Raises:
        ValueError: Nothing usable is there; one line.
    """
    path = str(embedded_path()) if name == "embedded" else os.path.expanduser(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    is_folder = Path(path).is_dir()
    if name.startswith((".", "/", "~")) and not is_folder:
        raise ValueError(f"tokenizer {name!r}: no such folder (unless one is given, it is that of the model's target)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # OSError, ValueError, KeyError, ImportError, and those of transformers' parsers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if is_folder else " (no folder here, so it was looked for on the hub)"
        raise ValueError(f"tokenizer {name!r}{f' ({gguf_file})' if gguf_file else ''}{where}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer {name!r}: expected a transformers tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills up the rows of a batch: the tokenizer's padding token, or 0 where its vocabulary has none."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) and 0 <= pad < len(tokenizer) else 0

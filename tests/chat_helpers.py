"""Tokenizers and rows for the tests of the datamodule.

The tokenizer knows every byte and a few special tokens, and merges nothing: one ASCII character is one token, so that
masks can be counted by hand.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MASK_ID = 2  # <|mask|>
SPECIAL = ["<pad>", "<|im_start|>", "<|mask|>", "<|im_end|>", "<think>", "</think>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE_TAGS = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# Like Qwen3's: only the last turn keeps its reasoning.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    """The tokenizer described above; `merges` adds byte pairs that become one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tokenizer(folder: Path, chat_template: str | None = CHATML) -> str:
    """Save the tokenizer to a folder and return its path."""
    byte_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """A row of `messages`: user and assistant take turns, the user begins."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **fields}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON Lines, a string as it stands, and return the path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what `datasets` caches out of the user's home; in effect in every module that imports it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    yield

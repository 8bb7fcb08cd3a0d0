"""Which tokens of a row stand for images, videos and sound, and which of them belong together.

Nothing here knows a family. What a token is for is read off the names that the processor and its tokenizer have for it
(`image_token`, `boi_token_id`, `vision_start_token`, ...) and off the text of special tokens (`<|vision_end|>`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase, ProcessorMixin

_OPENING = {"boi", "bov", "boa"}  # beginning of image, video, audio
_CLOSING = {"eoi", "eov", "eoa"}
_MEDIA = {"image", "img", "vision", "video", "audio", "media"} | _OPENING | _CLOSING
_OPENING_WORDS = {"start", "begin", "beginning", "bos"} | _OPENING
_CLOSING_WORDS = {"end", "eos"} | _CLOSING


def vision_token_ids(processor: ProcessorMixin) -> frozenset[int]:
    """The ids of all tokens that stand for images, videos or sound, or frame them."""
    return _token_roles(processor).ids


def placeholder_spans(input_ids: Tensor, processor: ProcessorMixin) -> list[tuple[int, int]]:
    """Find the parts of a row that must be kept or cut off as a whole: the placeholders of an image and their frame.

    Images side by side are told apart by the tokens that open and close them; where a family has neither, they are one
    span. The frames of a video are spans of their own where the family frames each.

    Args:
        input_ids: [S], as the processor returns them, one placeholder per feature of the image.
        processor: the one they come from.

    Returns:
        start and end, which is excluded, of each span, from left to right.
    """
    roles = _token_roles(processor)
    tokens: list[int] = input_ids.tolist()
    spans: list[tuple[int, int]] = []
    for in_span, run in groupby(range(len(tokens)), key=lambda i: tokens[i] in roles.ids):
        if in_span:
            spans.extend(_split(list(run), tokens, roles))
    # A frame around nothing is text: somebody wrote the token.
    return [(start, end) for start, end in spans if not roles.frame.issuperset(tokens[start:end])]


@dataclass(frozen=True)
class _TokenRoles:
    ids: frozenset[int]
    opening: frozenset[int]
    closing: frozenset[int]

    @property
    def frame(self) -> frozenset[int]:
        return self.opening | self.closing


def _split(run: list[int], tokens: list[int], roles: _TokenRoles) -> Iterator[tuple[int, int]]:
    """Cut a run of positions in front of every opening token and behind every closing one."""
    start = run[0]
    for i in run:
        if tokens[i] in roles.opening and i > start:
            yield start, i
            start = i
        if tokens[i] in roles.closing:
            yield start, i + 1
            start = i + 1
    if start <= run[-1]:
        yield start, run[-1] + 1


@lru_cache(maxsize=8)  # some tokenizers have thousands of special tokens, and every row asks
def _token_roles(processor: ProcessorMixin) -> _TokenRoles:
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    ids: set[int] = set()
    opening: set[int] = set()
    closing: set[int] = set()
    for name, token_id in (*_named_tokens(processor, tokenizer), *_special_tokens(tokenizer)):
        words = set(re.findall("[a-z]+", name.lower()))
        if words & _MEDIA:
            ids.add(token_id)
            opening |= {token_id} if words & _OPENING_WORDS else set()
            closing |= {token_id} if words & _CLOSING_WORDS else set()
    return _TokenRoles(frozenset(ids), frozenset(opening), frozenset(closing))


def _named_tokens(processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
    """The tokens that are attributes, with the attributes' names."""
    attributes: dict[str, Any] = vars(tokenizer) | tokenizer.special_tokens_map | vars(processor)
    for name, value in attributes.items():
        if name.endswith("_token") and isinstance(value, str | AddedToken):
            found = [tokenizer.convert_tokens_to_ids(str(value))]
        elif name.endswith(("_token_id", "_token_index")):
            found = [value]
        elif name.endswith("_token_ids") and isinstance(value, list | tuple):
            found = [*value]
        else:
            continue
        # A token that the vocabulary lacks has no id, or that of the unknown token.
        yield from ((name, i) for i in found if isinstance(i, int) and i != tokenizer.unk_token_id)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
    added = cast(dict[int, AddedToken], getattr(tokenizer, "added_tokens_decoder", {}))
    yield from ((token.content, token_id) for token_id, token in added.items() if token.special)

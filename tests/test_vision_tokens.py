"""datamodules/vision_tokens.py: which tokens belong to images, and to which."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import TokenizersBackend

from dspark_lightning.datamodules.vision_tokens import placeholder_spans, vision_token_ids
from vlm_helpers import FAMILIES, SOME_SIZES, picture, process, tiny_vlm

QWEN = {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
GEMMA = {"<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"}
TOKENS = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "gemma4_vl": GEMMA,
    "gemma4_unified_vl": GEMMA,
    "minimax_m3_vl": {"]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["},
}
LENGTHS = {"gemma4_vl": [66, 58, 66, 57], "gemma4_unified_vl": [66, 58, 66, 57]}


class MadeUp(SimpleNamespace):
    """Stands for a processor, which is hashed by identity."""

    __hash__ = object.__hash__


def made_up(tokens: list[str], named: dict[str, str] | None = None, **attributes: Any) -> Any:
    """A processor whose tokenizer has these special tokens, with ids from 1 on, and whose attributes are these."""
    inner = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = TokenizersBackend(tokenizer_object=inner, unk_token="[UNK]", extra_special_tokens=named or {})
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    return MadeUp(tokenizer=tokenizer, **attributes)


def spans(ids: list[int], processor: Any) -> list[tuple[int, int]]:
    return placeholder_spans(torch.tensor(ids), processor)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_family(family: str) -> None:
    tokenizer = tiny_vlm(family)[1].tokenizer
    assert set(tokenizer.convert_ids_to_tokens(list(vision_token_ids(tiny_vlm(family)[1])))) == TOKENS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_image_is_a_span_with_its_frame(family: str) -> None:
    _, processor = tiny_vlm(family)
    pictures = [picture(*size) for size in SOME_SIZES]
    ids = process(processor, [pictures[0], "and", *pictures[1:]], ["Hi"])["input_ids"]
    found = placeholder_spans(ids[0], processor)
    lengths = LENGTHS.get(family, [6, 5, 3, 12])
    assert [end - start for start, end in found] == lengths
    start = found[0][0]
    between = len(processor.tokenizer.encode("and"))
    assert found == [
        (start, start + lengths[0]),
        *((a + between + start, b + between + start) for a, b in neighbours(lengths)),
    ]
    frame = {ids[0, i].item() for a, b in found for i in (a, b - 1)}
    assert len(frame) == 2 and model_token(family) not in frame
    assert placeholder_spans(ids[1], processor) == []


def neighbours(lengths: list[int]) -> list[tuple[int, int]]:
    """The spans behind the first, side by side."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return list(pairwise(ends))


def model_token(family: str) -> int:
    return tiny_vlm(family)[0].config.image_token_id


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_cut_inside_an_image(family: str) -> None:
    _, processor = tiny_vlm(family)
    ids = process(processor, ["Hi", picture(56, 56)])["input_ids"][0]
    [(start, end)] = placeholder_spans(ids, processor)
    assert placeholder_spans(ids[: end - 2], processor) == [(start, end - 2)]
    assert placeholder_spans(ids[start + 2 :], processor) == [(0, end - start - 2)]


def test_a_frame_around_nothing_is_text() -> None:
    processor = made_up(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    assert vision_token_ids(processor) == {1, 2, 3}
    assert spans([9, 1, 2, 9, 1, 9, 1, 3, 3, 2], processor) == [(6, 10)]


def test_breaks_inside_an_image_do_not_cut_it() -> None:
    """Rows of patches with a token between them, an end and no beginning."""
    processor = made_up(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    assert spans([9, 1, 1, 2, 1, 1, 3, 1, 2, 1, 3, 9], processor) == [(1, 7), (7, 11)]


def test_a_beginning_without_an_end() -> None:
    processor = made_up(["<image_start>", "<image>"])
    assert spans([1, 2, 2, 1, 2, 9, 2], processor) == [(0, 3), (3, 5), (6, 7)]


def test_without_a_frame_neighbours_are_one_span() -> None:
    processor = made_up(["<image>", "<video>"], image_token="<image>")
    assert spans([1, 1, 9, 1, 1, 2], processor) == [(0, 2), (3, 6)]


def test_names_tell_what_texts_do_not() -> None:
    processor = made_up(
        ["<s>", "<patch>", "<o>", "<c>", "<|tool|>"],
        image_token="<patch>",
        boi_token_id=3,
        eoi_token_id=4,
        video_token="<missing>",
        audio_ms_per_token=5,
        image_seq_length=1,
    )
    assert vision_token_ids(processor) == {2, 3, 4}
    assert spans([3, 2, 4, 3, 2, 2, 4, 1], processor) == [(0, 3), (3, 7)]


def test_names_of_the_tokenizer_count_too() -> None:
    processor = made_up([], named={"image_token": "<p>", "eot_token": "<t>", "eoi_token": "<e>"})
    convert = processor.tokenizer.convert_tokens_to_ids
    assert vision_token_ids(processor) == {convert("<p>"), convert("<e>")}

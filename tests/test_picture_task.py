"""The target that reads pictures: the pictures and their questions, what is shipped, and that it reads them."""

import base64
import io
import json
import random
import re
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import ProcessorMixin, Qwen3VLForConditionalGeneration

import build_picture_target as build
from dspark_lightning.datamodules.processor import load_processor
from dspark_lightning.datamodules.vlm_rows import VlmChat, parse_vlm_row
from dspark_lightning.embedded import embedded_path, embedded_pictures_data, embedded_pictures_path
from dspark_lightning.loading import load_target
from picture_task import CELL, COLOURS, EMPTY, SHAPES, Cell, Grid, colours_and_shapes, describe, examples, lines, paint

SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<|mask|>"),
]
PAD, START, END, VISION_START, VISION_END, _, IMAGE, VIDEO, MASK = range(9)
GRID: Grid = [
    [("red", "circle"), ("blue", "ring"), EMPTY],
    [("green", "cross"), ("red", "square"), ("white", "ring")],
    [EMPTY, ("black", "diamond"), ("blue", "triangle")],
]
ANSWERS = {
    "row by row": "red circle blue ring empty cell; green cross red square white ring; "
    "empty cell black diamond blue triangle.",
    "column by column": "red circle green cross empty cell; blue ring red square black diamond; "
    "empty cell white ring blue triangle.",
    "backwards": "blue triangle black diamond empty cell; white ring red square green cross; "
    "empty cell blue ring red circle.",
}
NAMED_LINES = {
    "the top row": "red circle blue ring empty cell",
    "the middle row": "green cross red square white ring",
    "the bottom row": "empty cell black diamond blue triangle",
    "the left column": "red circle green cross empty cell",
    "the middle column": "blue ring red square black diamond",
    "the right column": "empty cell white ring blue triangle",
}


@cache
def rows(split: str) -> list[VlmChat]:
    return [parse_vlm_row(json.loads(line)) for line in embedded_pictures_data(split).read_text().splitlines()]  # type: ignore[arg-type]


@cache
def target() -> tuple[Qwen3VLForConditionalGeneration, ProcessorMixin]:
    folder = str(embedded_pictures_path())
    return load_target(folder), load_processor(folder)  # type: ignore[return-value]


def question(row: VlmChat) -> str:
    return row.chat.messages[0]["content"][1]["text"]  # type: ignore[no-any-return]


def see(picture: Image.Image, row: int, column: int) -> Cell:
    """Read one cell off its pixels, in another way than it was drawn."""
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    cell = pixels[CELL * row : CELL * (row + 1), CELL * column : CELL * (column + 1)]
    inked = (cell != pixels[0, 0]).any(axis=-1)
    if not inked.any():
        return EMPTY
    (y,), (x,) = (np.nonzero(inked.any(axis=axis)) for axis in (1, 0))
    shape = inked[y[0] : y[-1] + 1, x[0] : x[-1] + 1]
    colour = np.median(cell[inked], axis=0)
    return min(COLOURS, key=lambda name: np.abs(COLOURS[name] - colour).sum()), name_shape(shape)


def name_shape(inked: np.ndarray) -> str:
    """By whether there is ink in the centre, in two corners, a little inside a corner, beside the top."""
    last = len(inked) - 1
    if not inked[last // 2, last // 2]:
        return "ring"
    if inked[last, 0]:
        return "square" if inked[0, 0] else "triangle"
    inside = len(inked) // 5
    if inked[inside, inside]:
        return "circle"
    return "cross" if inked[0, last // 2 + 1] else "diamond"


def test_same_seed_gives_the_same_examples() -> None:
    first, again, other = (list(islice(examples(seed), 20)) for seed in (7, 7, 8))
    for one, two in zip(first, again, strict=True):
        assert (one.question, one.answer, one.picture.tobytes()) == (two.question, two.answer, two.picture.tobytes())
        assert one.picture.getpalette() == two.picture.getpalette()
    assert [row.grid for row in first] != [row.grid for row in other]


def test_pictures_show_what_their_grids_say() -> None:
    shown = list(islice(examples(3), 60))
    for row in shown:
        assert [[see(row.picture, i, j) for j in range(3)] for i in range(3)] == row.grid
    cells = {cell for row in shown for line in row.grid for cell in line}
    assert len(cells) > 48 * 0.9 and EMPTY in cells
    assert {colour for colour, _ in cells} == {*COLOURS, "empty"} and {shape for _, shape in cells} == {*SHAPES, "cell"}


def test_one_grid_is_painted_in_many_ways() -> None:
    rng = random.Random(0)
    assert len({paint(rng, GRID).convert("RGB").tobytes() for _ in range(50)}) == 50


def test_answers_to_a_grid_worked_by_hand() -> None:
    rng = random.Random(0)
    for _ in range(20):
        asked, answer = describe(rng, GRID)
        assert answer == next(words for path, words in ANSWERS.items() if path in asked)
        asked, answer = lines(rng, GRID)
        named = re.findall(r"the \w+ (?:row|column)", asked)
        assert len(set(named)) == 3
        assert answer == "; ".join(NAMED_LINES[name] for name in named) + "."


def test_colours_and_then_shapes_or_the_other_way_round() -> None:
    answers = {
        ("colours", "row by row"): "red blue empty; green red white; empty black blue.",
        ("colours", "column by column"): "red green empty; blue red black; empty white blue.",
        ("colours", "backwards"): "blue black empty; white red green; empty blue red.",
        ("shapes", "row by row"): "circle ring cell; cross square ring; cell diamond triangle.",
        ("shapes", "column by column"): "circle cross cell; ring square diamond; cell ring triangle.",
        ("shapes", "backwards"): "triangle diamond cell; ring square cross; cell ring circle.",
    }
    rng = random.Random(0)
    for _ in range(40):
        asked, answer = colours_and_shapes(rng, GRID)
        parts = re.findall(r"(colours|shapes) (row by row|column by column|backwards)", asked)
        assert answer == " ".join(answers[part] for part in parts)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'train' and 'heldout', got 'test'"):
        embedded_pictures_data("test")  # type: ignore[arg-type]


@pytest.mark.parametrize(("split", "count"), [("train", 1200), ("heldout", 150)])
def test_rows_are_a_picture_a_question_and_an_answer(split: str, count: int) -> None:
    tokenizer: Any = target()[1].tokenizer  # type: ignore[attr-defined]
    assert len(rows(split)) == count
    for row in rows(split):
        assert [message["role"] for message in row.chat.messages] == ["user", "assistant"]
        assert [part["type"] for part in row.chat.messages[0]["content"]] == ["image", "text"]
        assert [picture.size for picture in row.images] == [(3 * CELL, 3 * CELL)]
        asked, answered = tokenizer([question(row), row.chat.messages[1]["content"]])["input_ids"]
        assert 14 <= len(answered) <= 63 and not row.chat.truncated
        assert min(asked + answered) > MASK  # no special token, so no mask token either


def test_most_answers_have_twenty_to_sixty_tokens() -> None:
    tokenizer: Any = target()[1].tokenizer  # type: ignore[attr-defined]
    lengths = [len(tokenizer(row.chat.messages[1]["content"])["input_ids"]) + 1 for row in rows("train")]
    assert sum(20 <= length <= 60 for length in lengths) > 0.9 * len(lengths)


def test_no_picture_of_a_heldout_row_is_trained_on() -> None:
    train, heldout = ({row.images[0].tobytes() for row in rows(split)} for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (1200, 150) and not train & heldout


def test_script_asks_what_was_shipped() -> None:
    for split, seed in (("train", build.TRAIN_SEED), ("heldout", build.HELDOUT_SEED)):
        for row, example in zip(rows(split), examples(seed), strict=False):
            assert (question(row), row.images[0].tobytes()) == (
                example.question,
                example.picture.convert("RGB").tobytes(),
            )


def test_pictures_are_kept_as_small_files() -> None:
    for line in embedded_pictures_data("heldout").read_text().splitlines():
        file = base64.b64decode(json.loads(line)["conversation"][0]["content"][0]["base64"])
        assert len(file) < 700 and Image.open(io.BytesIO(file)).format == "PNG"


def test_shipped_files_stay_small() -> None:
    folder = embedded_pictures_path().parent
    assert folder.parent == embedded_path().parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 4_000_000


def test_weights_lie_in_bf16_and_are_complete() -> None:
    stored = load_file(embedded_pictures_path() / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert set(stored) == {name for name, _ in target()[0].named_parameters()}


def test_ids_agree_between_tokenizer_and_configs() -> None:
    model, processor = target()
    tokenizer: Any = processor.tokenizer  # type: ignore[attr-defined]
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(9))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (PAD, END, MASK)
    config, text = model.config, model.config.text_config
    assert (config.image_token_id, config.video_token_id) == (IMAGE, VIDEO)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (VISION_START, VISION_END)
    for other in (text, model.generation_config):
        assert (other.pad_token_id, other.eos_token_id) == (PAD, END)
    assert len(tokenizer) == text.vocab_size == build.VOCAB_SIZE


def test_a_prompt_and_its_picture() -> None:
    _, processor = target()
    row = next(examples(11))
    batch = build.encode(processor, [row], answered=False)
    asked = processor.tokenizer(row.question)["input_ids"]  # type: ignore[attr-defined]
    newline, user, assistant = (processor.tokenizer(text)["input_ids"] for text in ("\n", "user", "assistant"))  # type: ignore[attr-defined]
    assert batch["input_ids"].tolist() == [
        [
            *(START, *user, *newline, VISION_START, *[IMAGE] * 9, VISION_END, *asked, END, *newline),
            *(START, *assistant, *newline),
        ]
    ]
    assert batch["image_grid_thw"].tolist() == [[1, 6, 6]]  # patches, four to a token: the picture was not resized


def test_words_of_answers_are_single_tokens() -> None:
    tokenizer: Any = target()[1].tokenizer  # type: ignore[attr-defined]
    for word in (*COLOURS, *SHAPES, *EMPTY):
        assert [len(ids) for ids in tokenizer([word, " " + word])["input_ids"]] == [1, 1], word


def test_target_answers_by_its_picture() -> None:
    model, processor = target()
    asked = list(islice(examples(build.HELDOUT_SEED), 20))
    wrong = build.with_wrong_pictures(asked)
    answers = build.write_answers(model, processor, asked)
    assert answers == [row.chat.messages[1]["content"] for row in rows("heldout")[:20]]
    assert build.right_answers(asked, answers) >= 0.9
    assert build.right_answers(asked, build.write_answers(model, processor, wrong)) < 0.2
    assert build.token_accuracy(model, processor, asked) > 0.98
    assert build.token_accuracy(model, processor, wrong) < 0.5


def test_script_rebuilds_the_shipped_tokenizer() -> None:
    built = json.loads(build.build_processor().tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    stored = json.loads((embedded_pictures_path() / "tokenizer.json").read_text())
    assert built["model"] == stored["model"] and built["added_tokens"] == stored["added_tokens"]


@pytest.mark.slow
def test_script_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "TOWER_STEPS", 100)
    monkeypatch.setattr(build, "TRAINING_STEPS", 100)
    build.train_target(target()[1])
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[0] < 3.5 and losses[1] < 3.5

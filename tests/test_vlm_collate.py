"""The unshifted collate: ids, masks and pixels for every family of vision-language targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ProcessorMixin

from dspark_lightning import build_draft_model, dspark_vlm_collate_fn
from dspark_lightning.datamodules.vision_tokens import placeholder_spans, vision_token_ids
from dspark_lightning.target import HFDSparkTargetModel
from helpers import assert_same, seeded
from tiny_vlm import TINY_VLMS
from vlm_helpers import FAMILIES, WITHOUT_TORCHVISION, picture, tiny_vlm

LENGTH = 320
ANSWER = "It is red, and so on."
MASKS = {"input_ids", "attention_mask", "loss_mask"}


def image_row(*pictures: Any, answer: str = ANSWER) -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in pictures]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"conversation": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def text_row(question: str = "And what is that?") -> dict[str, Any]:
    content = [{"type": "text", "text": question}]
    return {"conversation": [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]}


def collate(
    family: str, *rows: dict[str, Any], length: int = LENGTH, **options: Any
) -> tuple[ProcessorMixin, dict[str, Tensor]]:
    processor = tiny_vlm(family)[1]
    return processor, dspark_vlm_collate_fn(list(rows), processor, length, **options)


def supervised_text(processor: ProcessorMixin, batch: dict[str, Tensor], row: int) -> str:
    ids = batch["input_ids"][row][batch["loss_mask"][row].bool()]
    return processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_is_the_answer_with_its_end(family: str) -> None:
    processor, batch = collate(family, image_row(picture(56, 56), picture(84, 56)), text_row())
    for row in (0, 1):
        assert supervised_text(processor, batch, row) == ANSWER + TINY_VLMS[family].end
    vision = torch.isin(batch["input_ids"], torch.tensor(sorted(vision_token_ids(processor))))
    assert vision.any(dim=1).all() and not batch["loss_mask"][vision].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_padding(family: str) -> None:
    processor, batch = collate(family, image_row(picture(56, 56)), text_row())
    for name in MASKS:
        assert batch[name].shape == (2, LENGTH) and batch[name].dtype == torch.int64
    assert "labels" not in batch
    mask = batch["attention_mask"]
    assert (mask[:, 1:] <= mask[:, :-1]).all() and (mask.sum(dim=1) < LENGTH).all()
    whole = processor(
        text=[processor.apply_chat_template(image_row(picture(56, 56))["conversation"], tokenize=False)],
        images=[[picture(56, 56)]],
        add_special_tokens=False,
        return_tensors="pt",
    )
    real = int(mask[0].sum())
    assert torch.equal(batch["input_ids"][0, :real], whole["input_ids"][0])
    assert (batch["input_ids"][0, real:] == processor.tokenizer.pad_token_id).all()
    for name, values in whole.items():
        if name not in MASKS and values.shape == whole["input_ids"].shape:
            assert torch.equal(batch[name][0, :real], values[0]) and not batch[name][0, real:].any()
        elif name not in MASKS:
            assert torch.equal(batch[name][: len(values)], values)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_row_gets_a_hidden_white_picture(family: str) -> None:
    processor, batch = collate(family, text_row())
    ((start, _),) = placeholder_spans(batch["input_ids"][0], processor)
    assert start == batch["attention_mask"].sum()  # right behind the last real token
    assert not batch["attention_mask"][0, start:].any() and not batch["loss_mask"][0, start:].any()
    assert "pixel_values" in batch
    _, plain = collate(family, text_row(), inject_fake_image=False)
    assert not placeholder_spans(plain["input_ids"][0], processor)
    assert torch.equal(plain["input_ids"][0, :start], batch["input_ids"][0, :start])
    assert plain.keys() <= MASKS | {"mm_token_type_ids"}


def features_and_logits(family: str, batch: dict[str, Tensor], row: int, masked: bool) -> tuple[Tensor, Tensor]:
    model = tiny_vlm(family)[0]
    with seeded(0):
        draft = build_draft_model(model.config, mask_token_id=5, num_draft_layers=2, block_size=4, markov_rank=8)
    target = HFDSparkTargetModel(model, draft.target_layer_ids)
    draft.initialize_embeddings_and_head(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    media = {name: values for name, values in batch.items() if name not in MASKS}
    mask = batch["attention_mask"]
    captured = target.generate_batch(batch["input_ids"], mask if masked else None, batch["loss_mask"], **media)
    real = int(mask[row].sum())
    anchors = batch["loss_mask"][row].nonzero().squeeze(-1)[:6].expand(len(mask), -1)
    places = {"anchor_positions": anchors, "block_keep_mask": torch.ones_like(anchors, dtype=torch.bool)}
    logits = draft(**vars(captured), **places, attention_mask=mask).draft_logits
    return captured.target_hidden_states[row, :real], logits[row]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_white_picture_changes_nothing_else(family: str, text_first: bool, masked: bool) -> None:
    """Neither the row it is appended to, nor a row with a picture of its own beside it."""
    text, image = text_row(), image_row(picture(84, 56))  # not of the white picture's size
    together = collate(family, *((text, image) if text_first else (image, text)))[1]
    alone = collate(family, text, inject_fake_image=False)[1], collate(family, image)[1]
    for row, expected in enumerate(alone if text_first else reversed(alone)):
        ours = features_and_logits(family, together, row, masked)
        plain = features_and_logits(family, expected, 0, masked)
        if "minimax" in family and "pixel_values" in expected and not _minimax_keeps_images_apart():
            continue
        assert_same(ours[0], plain[0], "features")
        assert_same(ours[1], plain[1], "draft logits")


def _minimax_keeps_images_apart() -> bool:
    """Some versions of transformers let the pictures of a batch see each other in MiniMax's tower."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_never_cut(family: str) -> None:
    """For every length: whole pictures only, their tensors with them, and a hidden white one where none is left."""
    processor, whole = collate(family, image_row(picture(56, 56), picture(84, 56)))
    spans, total = placeholder_spans(whole["input_ids"][0], processor), int(whole["attention_mask"].sum())
    white = collate(family, text_row())[1]
    ((start, end),) = placeholder_spans(white["input_ids"][0], processor)
    white_size = end - start
    first = collate(family, image_row(picture(56, 56)))[1]
    for length in sorted({spans[0][0] + white_size, *(p for s, e in spans for p in (s + 1, e - 1, e)), total - 1}):
        if length < white_size + 2:
            continue
        _, batch = collate(family, image_row(picture(56, 56), picture(84, 56)), length=length)
        kept = [span for span in spans if span[1] <= length]
        real = int(batch["attention_mask"].sum())
        found = placeholder_spans(batch["input_ids"][0], processor)
        assert torch.equal(batch["input_ids"][0, :real], whole["input_ids"][0, :real])
        assert found[: len(kept)] == kept and len(found) == max(len(kept), 1)
        assert real <= min([length, *(start for start, end in spans if end > length)])
        expected = {0: white, 1: first, 2: whole}[len(kept)]
        for name in expected.keys() - MASKS - {"mm_token_type_ids"}:
            assert torch.equal(batch[name], expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_cut_so_that_the_white_picture_fits(family: str) -> None:
    processor, whole = collate(family, text_row("a " * 200))
    (span,) = placeholder_spans(whole["input_ids"][0], processor)
    size = span[1] - span[0]
    length = size + 20
    _, batch = collate(family, text_row("a " * 200), length=length)
    assert batch["attention_mask"].sum() == 20
    assert placeholder_spans(batch["input_ids"][0], processor) == [(20, length)]
    with pytest.raises(ValueError, match=f"max_length {size} has no room .* must be at least {size + 2}"):
        collate(family, text_row(), length=size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_batch(family: str) -> None:
    rows = [image_row(picture(56, 56)), text_row(), image_row(picture(28, 84, seed=1), picture(56, 56))]
    together = collate(family, *rows)[1]
    for place, row in enumerate(rows):
        alone = collate(family, row)[1]
        for name in MASKS:
            assert torch.equal(together[name][place], alone[name][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_row_keeps_a_picture_of_one_token(family: str) -> None:
    """Its grid has the shape of three token ids."""
    row, first = image_row(picture(28, 28), picture(84, 56)), image_row(picture(28, 28))
    processor, whole = collate(family, row)
    spans = placeholder_spans(whole["input_ids"][0], processor)
    _, cut = collate(family, row, length=spans[1][1] - 1)
    _, alone = collate(family, first)
    for name in alone.keys() - MASKS - {"mm_token_type_ids"}:
        assert torch.equal(cut[name], alone[name]), name


def test_a_row_that_is_no_object_is_named() -> None:
    with pytest.raises(ValueError, match="row 0: expected an object with the fields of a row, got str"):
        dspark_vlm_collate_fn(["hello"], tiny_vlm("qwen3_vl")[1], LENGTH)  # type: ignore[list-item]


ROW_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no file": (image_row("no/such.png"), r"row 7: the image file 'no/such\.png' does not exist"),
    "broken": (image_row(b"junk"), "row 7: the image in 4 bytes cannot be read: no known format"),
    "missing": (image_row(None), "row 7: picture 1 of the row is missing"),
    "left over": ({**text_row(), "images": [picture(28, 28)]}, "row 7: the row has 1 pictures more than"),
    "video": (
        {
            "conversation": [
                {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
                text_row()["conversation"][1],
            ]
        },
        "row 7: the row has a video, and reading videos needs torchvision",
    ),
    "unknown part": (
        {"conversation": [{"role": "user", "content": [{"type": "audio"}]}]},
        "row 7: the user turn has a part of type 'audio'; known are text, image, video",
    ),
    "no answer": ({"conversation": text_row()["conversation"][:1]}, "row 7: no assistant turn"),
    "picture in an answer": (
        {"conversation": [{"role": "assistant", "content": [{"type": "image", "image": picture(28, 28)}]}]},
        "row 7: the assistant turn has a part of type 'image'",
    ),
}


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("case", ROW_ERRORS)
def test_a_row_that_cannot_be_used_is_named(case: str) -> None:
    row, message = ROW_ERRORS[case]
    with pytest.raises(ValueError, match=message) as error:
        collate("qwen3_vl", text_row(), {**row, "row_id": 7})
    assert "\n" not in str(error.value)


def test_pictures_from_the_rows_own_list(tmp_path: Path) -> None:
    """Data sets keep the pictures of a row in a column, and leave the parts of the conversation empty."""
    first, second = picture(56, 56), picture(84, 56)
    second.save(tmp_path / "b.png")
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}, {"type": "image"}]
    conversation = [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]
    own = [{"type": "image", "image": first}, content[1], {"type": "image", "path": str(tmp_path / "b.png")}]
    listed = collate(
        "qwen3_vl", {"messages": conversation, "images": [first, {"bytes": None, "path": str(tmp_path / "b.png")}]}
    )[1]
    inline = collate("qwen3_vl", {"conversation": [{"role": "user", "content": own}, conversation[1]]})[1]
    assert all(torch.equal(listed[name], inline[name]) for name in inline)


def test_row_ids_are_passed_on() -> None:
    _, batch = collate("qwen3_vl", {**text_row(), "row_id": 3}, {**text_row(), "row_id": 9})
    assert batch["row_id"].tolist() == [3, 9]
    assert "row_id" not in collate("qwen3_vl", text_row())[1]

"""VLMDataModule: rows from every source, counted before training; batches of fixed shapes."""

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from dspark_lightning.datamodules import VLMDataModule
from dspark_lightning.datamodules.processor import load_processor
from dspark_lightning.datamodules.vlm_collate import dspark_vlm_collate_fn
from tiny_vlm import build_tiny_processor
from vlm_helpers import picture

MASK, LENGTH = 5, 96
ANSWER = "It is red, and so on."


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("processor")
    build_tiny_processor("qwen3_vl").save_pretrained(folder)
    return str(folder)


def turns(image: Any = None, question: str = "What is this?", answer: str = ANSWER) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if image is not None:
        content.insert(0, image)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def module(processor: str, train_data: str, **changes: Any) -> VLMDataModule:
    settings = {"tokenizer": processor, "mask_token_id": MASK, "max_length": LENGTH, "batch_size": 2}
    data = VLMDataModule(train_data, **{**settings, "min_supervised_tokens": 4, **changes})
    data.setup("fit")
    return data


def first_batch(data: VLMDataModule) -> dict[str, torch.Tensor]:
    return next(iter(data.train_dataloader()))


def rows_of_a_function() -> list[dict[str, Any]]:
    return [{"conversation": turns({"type": "image", "image": picture(56, 56, seed)})} for seed in (0, 1)]


def image_column(folder: Path) -> str:
    question, answer = turns({"type": "image"})
    # A column holds one kind of content, here lists of parts.
    conversation = [question, {**answer, "content": [{"type": "text", "text": answer["content"]}]}]
    table = datasets.Dataset.from_dict(
        {
            "conversation": [conversation, conversation],
            "images": [[picture(56, 56, seed)] for seed in (0, 1)],
        }
    ).cast_column("images", datasets.List(datasets.Image()))
    path = folder / "rows.parquet"
    table.to_parquet(path)
    return str(path)


def jsonl_with(folder: Path, part: Any) -> str:
    rows = []
    for seed in (0, 1):
        picture(56, 56, seed).save(folder / f"{seed}.png")
        rows.append({"conversation": turns(part(seed))})
    return write(folder / "rows.jsonl", rows)


SOURCES: dict[str, Any] = {
    "paths beside the file": lambda folder: jsonl_with(folder, lambda i: {"type": "image", "path": f"{i}.png"}),
    "base64": lambda folder: jsonl_with(
        folder, lambda i: {"type": "image", "base64": base64.b64encode(png(picture(56, 56, i))).decode()}
    ),
    "image column": image_column,
    "function": lambda folder: "test_vlm_datamodule_rows:rows",
}


@pytest.fixture(autouse=True)
def importable_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's with a function that makes rows."""
    import sys
    import types

    made = types.ModuleType("test_vlm_datamodule_rows")
    made.rows = rows_of_a_function  # type: ignore[attr-defined]
    made.nothing = lambda: 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "test_vlm_datamodule_rows", made)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_batch(source: str, processor: str, tmp_path: Path) -> None:
    data = module(processor, SOURCES[source](tmp_path))
    batch = first_batch(data)
    order = batch.pop("row_id").tolist()
    assert sorted(order) == [0, 1]
    expected = dspark_vlm_collate_fn([rows_of_a_function()[i] for i in order], load_processor(processor), LENGTH)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_workers_give_the_same_batches(processor: str, tmp_path: Path) -> None:
    path = SOURCES["paths beside the file"](tmp_path)
    plain, parallel = (first_batch(module(processor, path, num_workers=n)) for n in (0, 2))
    assert all(torch.equal(plain[name], parallel[name]) for name in plain)


def test_text_and_pictures_mix(processor: str, tmp_path: Path) -> None:
    picture(56, 56).save(tmp_path / "a.png")
    rows = [{"conversation": turns({"type": "image", "path": "a.png"})}, {"messages": turns(question="And that?")}]
    batch = first_batch(module(processor, write(tmp_path / "rows.jsonl", rows)))
    assert batch["image_grid_thw"].shape == (2, 3) and batch["input_ids"].shape == (2, LENGTH)
    plain = first_batch(module(processor, str(tmp_path / "rows.jsonl"), inject_fake_image=False))
    assert plain["image_grid_thw"].shape == (1, 3)


def test_rows_are_counted_by_what_becomes_of_them(
    processor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture(56, 56).save(tmp_path / "a.png")
    picture(112, 112, 1).save(tmp_path / "big.png")
    image = {"type": "image", "path": "a.png"}
    long_text = "a " * 200
    rows = [
        {"conversation": turns(image)},
        {"conversation": turns(image, question=long_text)},  # the answer is cut off
        {"conversation": turns({"type": "image", "path": "no.png"})},
        {"conversation": turns(image, answer=ANSWER * 20)},  # cut, but enough is left
    ]
    data = module(processor, write(tmp_path / "rows.jsonl", rows), max_bad_rows=1)
    summary = data._rows["train"].summary()
    assert "4 rows read, 2 kept (dropped: 1 unreadable picture, 1 under 4 supervised tokens), 1 of them cut" in summary
    [(loss, is_bad), *_] = data.row_sets["train"].losses()
    assert is_bad and loss.endswith(
        f"{tmp_path / 'rows.jsonl'}:3: the image file '{tmp_path / 'no.png'}' does not exist or is no file"
    )
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:3: the image file '.*no\.png' does not exist or is no file \(1 bad rows"
    ):
        module(processor, str(tmp_path / "rows.jsonl"))


def test_rows_are_the_same_only_with_the_same_pictures(processor: str, tmp_path: Path) -> None:
    """Questions repeat: what is asked of two pictures in the same words is two rows."""
    train = SOURCES["paths beside the file"](tmp_path)
    held_out = write(tmp_path / "val.jsonl", [{"conversation": turns({"type": "image", "path": "1.png"})}])
    data = module(processor, train, val_data=held_out, batch_size=1)
    assert "1 kept (dropped: 1 identical to a validation row)" in data._rows["train"].summary()
    assert first_batch(data)["row_id"].tolist() == [0]


def test_every_file_has_its_own_folder(processor: str, tmp_path: Path) -> None:
    """Two files beside pictures of the same name."""
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        picture(56, 56, seed).save(tmp_path / name / "x.png")
        write(tmp_path / name / "rows.jsonl", [{"conversation": turns({"type": "image", "path": "x.png"})}])
    batch = first_batch(module(processor, str(tmp_path / "*" / "rows.jsonl")))
    order = batch["row_id"].tolist()
    expected = dspark_vlm_collate_fn([rows_of_a_function()[i] for i in order], load_processor(processor), LENGTH)
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])


def test_another_picture_in_the_same_file_is_encoded_again(processor: str, tmp_path: Path) -> None:
    path = SOURCES["paths beside the file"](tmp_path)
    before = module(processor, path)._rows["train"].encoded(0)["input_ids"]
    picture(112, 56).save(tmp_path / "0.png")
    after = module(processor, path)._rows["train"].encoded(0)["input_ids"]
    assert len(after) > len(before)


def test_a_picture_that_goes_missing_names_its_row(processor: str, tmp_path: Path) -> None:
    data = module(processor, SOURCES["paths beside the file"](tmp_path))
    (tmp_path / "1.png").unlink()
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the image file .*1\.png"):
        first_batch(data)


@pytest.mark.parametrize("split", ["train[2:4]", "train[3:4]+train[2:3]"])
def test_rows_of_a_slice_keep_their_numbers(processor: str, tmp_path: Path, split: str) -> None:
    rows = [{"messages": turns(question=f"What is {i}?")} for i in range(5)]
    data = module(processor, write(tmp_path / "rows.jsonl", rows), train_split=split)
    batch = first_batch(data)
    for place, row_id in enumerate(batch["row_id"].tolist()):
        assert row_id in (2, 3)
        text = data._encoder.renderer.tokenizer.decode(batch["input_ids"][place])
        assert f"What is {row_id}?" in text


def test_options_reach_the_loss_mask(processor: str, tmp_path: Path) -> None:
    two = [*turns({"type": "image", "path": "a.png"}), *turns(question="Sure?", answer="Yes, I am quite sure.")]
    picture(56, 56).save(tmp_path / "a.png")
    path = write(tmp_path / "rows.jsonl", [{"conversation": two}])
    whole, last = (module(processor, path, supervise=s, batch_size=1) for s in ("all", "last"))
    assert whole.preview().count("⟦") == 2
    assert last.preview().count("⟦") == 1 and "⟦Yes, I am quite sure.<|im_end|>⟧" in last.preview()
    shown = first_batch(last)["loss_mask"].sum() < first_batch(whole)["loss_mask"].sum()
    assert shown


def test_the_white_picture_is_part_of_the_cache_key(processor: str, tmp_path: Path) -> None:
    """With it less text fits."""
    path = write(tmp_path / "rows.jsonl", [{"messages": turns(answer=ANSWER * 9)}] * 2)
    counts = [module(processor, path, inject_fake_image=flag)._rows["train"].column("supervised") for flag in (1, 0)]
    assert (counts[0] < counts[1]).all()


def test_the_supervised_part_is_shown(processor: str, tmp_path: Path) -> None:
    data = module(processor, SOURCES["paths beside the file"](tmp_path))
    assert f"⟦{ANSWER}<|im_end|>⟧" in data.preview()


def test_weights_of_rows_come_with_the_batches(processor: str, tmp_path: Path) -> None:
    rows = [
        {"messages": turns(), "weight": 0.5},
        {"messages": turns(question="Which?"), "weight": 0},
        {"messages": turns()},
    ]
    batch = first_batch(module(processor, write(tmp_path / "rows.jsonl", rows), seed=1))
    for row, weights, mask in zip(*(batch[key] for key in ("row_id", "loss_weights", "attention_mask")), strict=True):
        assert weights.tolist() == (mask * {0: 0.5, 2: 1.0}[int(row)]).tolist()


def test_a_validation_filler_supervises_nothing(processor: str, tmp_path: Path) -> None:
    from dspark_lightning.datamodules.sampler import FILLER

    data = module(processor, SOURCES["paths beside the file"](tmp_path))
    rows = data._rows["train"]
    batch = data.collate_for()([rows[0], rows[FILLER]])
    assert batch["loss_mask"][0].any() and not batch["loss_mask"][1].any()
    assert batch["image_grid_thw"].shape == (2, 3)


def test_a_changed_option_encodes_again(processor: str, tmp_path: Path) -> None:
    path = SOURCES["paths beside the file"](tmp_path)
    whole = module(processor, path)._rows["train"].column("supervised")
    cut = module(processor, path, max_length=30)._rows["train"]
    assert cut.column("cut").all() and (cut.column("supervised") < whole).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("test_vlm_datamodule_rows:nothing", "must return a sequence of rows, got int"),
        ("test_vlm_datamodule_rows:absent", "has no attribute 'absent'"),
        ("no_such_module:rows", "No module named 'no_such_module'"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(data: str, message: str, processor: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        module(processor, data)
    assert data in str(error.value) and "\n" not in str(error.value)


def test_pre_tokenised_rows_are_refused(processor: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: input_ids are not read here"):
        module(processor, write(tmp_path / "rows.jsonl", [{"input_ids": [7, 8], "loss_mask": [0, 1]}]))


def test_a_text_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"processor '.*expected one for text and images"):
        module("embedded", write(tmp_path / "rows.jsonl", [{"conversation": turns()}]))


class Config:
    """Stands for a configuration that makes a data set."""

    def instantiate(self) -> list[dict[str, Any]]:
        return rows_of_a_function()


@pytest.mark.parametrize("source", [Config(), rows_of_a_function()], ids=["configuration", "rows"])
def test_the_dataloader(source: Any, processor: str) -> None:
    from dspark_lightning import build_dspark_vlm_dataloader

    loaded: ProcessorMixin = load_processor(processor)
    (batch,) = build_dspark_vlm_dataloader(source, loaded, 2, LENGTH, shuffle=False)
    assert batch.pop("row_id").tolist() == [0, 1]
    expected = dspark_vlm_collate_fn(rows_of_a_function(), loaded, LENGTH)
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    shuffled = build_dspark_vlm_dataloader(source, loaded, 1, LENGTH, shuffle=True)
    assert sorted(int(b["row_id"]) for b in shuffled) == [0, 1]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (7, {}, "dataset_cfg must give a sequence of rows, got int"),
        ([], {}, "dataset_cfg gives no rows"),
        ([{}], {"distributed": True}, "distributed is true"),
        ([{}], {"dp_mesh": SimpleNamespace(ndim=1)}, "dp_mesh must be .* distributed False"),
        ([{}], {"dp_mesh": SimpleNamespace(ndim=2), "distributed": True}, "dp_mesh must be .* got 2 dimensions"),
    ],
)
def test_a_dataloader_that_cannot_be(source: Any, options: dict[str, Any], message: str, processor: str) -> None:
    from dspark_lightning import build_dspark_vlm_dataloader

    with pytest.raises(ValueError, match=message):
        build_dspark_vlm_dataloader(source, load_processor(processor), 1, LENGTH, False, **options)

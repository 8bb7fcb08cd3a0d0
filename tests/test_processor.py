"""datamodules/processor.py: processors from the layouts that published folders have, without torchvision."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoProcessor, ProcessorMixin

from dspark_lightning.datamodules.processor import has_video_processor, load_processor
from dspark_lightning.embedded import embedded_path
from tiny_vlm import TINY_VLMS
from vlm_helpers import FAMILIES, WITHOUT_TORCHVISION, picture, process, tiny_vlm

pytestmark = WITHOUT_TORCHVISION
ROWS = [picture(56, 56), "and", picture(200, 100)], ["Hi", picture(84, 28)]


def same(first: ProcessorMixin, second: ProcessorMixin) -> bool:
    a, b = process(first, *ROWS), process(second, *ROWS)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def old_layout(folder: Path, family: str, **image_processor: Any) -> ProcessorMixin:
    """Write a family's processor as folders had it: a file for each part. Returns what was written."""
    processor = tiny_vlm(family)[1]
    processor.save_pretrained(folder)
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"] | image_processor
    settings["processor_class"] = TINY_VLMS[family].processor
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    video = {**settings, "video_processor_type": "Qwen2VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return processor


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_processor(family: str, tmp_path: Path) -> None:
    processor = tiny_vlm(family)[1]
    processor.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    assert isinstance(loaded, getattr(transformers, TINY_VLMS[family].processor))
    assert loaded.chat_template == processor.chat_template
    assert not has_video_processor(loaded)
    assert same(loaded, processor)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_travels_to_workers(family: str) -> None:
    processor = tiny_vlm(family)[1]
    assert same(pickle.loads(pickle.dumps(processor)), processor)
    assert same(copy.deepcopy(processor), processor)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_older_folders(family: str, kind: str, tmp_path: Path) -> None:
    processor = old_layout(tmp_path, family, image_processor_type=kind)
    assert same(load_processor(str(tmp_path)), processor)


def test_the_class_of_the_model_where_the_files_name_none(tmp_path: Path) -> None:
    model, processor = tiny_vlm("qwen3_vl")
    old_layout(tmp_path, "qwen3_vl")
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    del settings["processor_class"]
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(settings))
    tokenizer_config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer_config.pop("processor_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    model.config.save_pretrained(tmp_path)
    assert same(load_processor(str(tmp_path)), processor)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ([672, 672], {"shortest_edge": 3136, "longest_edge": 451584}),
        ({"shortest_edge": 784, "longest_edge": 12544}, {"shortest_edge": 784, "longest_edge": 12544}),
    ],
)
def test_minimax_m3_reads_images_as_qwen2_vl(size: Any, expected: dict[str, int], tmp_path: Path) -> None:
    processor = old_layout(tmp_path, "minimax_m3_vl", image_processor_type="MiniMaxM3VLImageProcessor", size=size)
    loaded = load_processor(str(tmp_path))
    assert type(loaded.image_processor).__name__ == "Qwen2VLImageProcessorPil"
    assert dict(loaded.image_processor.size) == expected
    assert same(loaded, processor) == (size == expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.values[0] == "gemma4_unified_vl"])
def test_gemma4_unified_reads_images_as_gemma4(family: str, tmp_path: Path) -> None:
    """Three by three patches of 4 pixels side by side are one of 12."""
    processor = old_layout(
        tmp_path, family, image_processor_type="Gemma4UnifiedImageProcessor", patch_size=4, pooling_kernel_size=3
    )
    loaded = load_processor(str(tmp_path))
    assert type(loaded.image_processor).__name__ == "Gemma4ImageProcessorPil"
    assert same(loaded, processor)


def test_with_torchvision_nothing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_vlm("qwen3_vl")[1]
    seen: list[Any] = []
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **kwargs: seen.append((args, kwargs)) or whole)
    assert load_processor(str(tmp_path), trust_remote_code=True) is whole
    assert seen == [((str(tmp_path),), {"trust_remote_code": True})]


def test_has_video_processor() -> None:
    processor = copy.copy(tiny_vlm("qwen3_vl")[1])
    assert not has_video_processor(processor)
    processor.video_processor = object()
    assert has_video_processor(processor)


def message(name: str) -> str:
    with pytest.raises(ValueError) as error:
        load_processor(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_processor_that_needs_torchvision(tmp_path: Path) -> None:
    old_layout(tmp_path, "qwen3_vl", image_processor_type="Sam2ImageProcessor")
    expected = f"processor '{tmp_path}': Qwen3VLProcessor cannot be loaded, perhaps for want of torchvision (pip "
    assert message(str(tmp_path)).startswith(expected + "install torchvision): ")


def test_refusals(tmp_path: Path) -> None:
    assert message(f"{tmp_path}/missing") == f"processor '{tmp_path}/missing': no such folder"
    assert message(str(tmp_path)).startswith(f"processor '{tmp_path}': ")
    assert "got TokenizersBackend" in message(str(embedded_path()))

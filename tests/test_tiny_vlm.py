"""scripts/tiny_vlm.py: its models with their processors, and the folder that its command writes."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import BatchFeature, PreTrainedModel

import tiny_vlm
from dspark_lightning.datamodules.processor import load_processor
from dspark_lightning.loading import load_target
from dspark_lightning.target import HFDSparkTargetModel
from helpers import assert_same
from tiny_vlm import TINY_VLMS, build_tiny_vlm, chat_template
from vlm_helpers import FAMILIES, SOME_SIZES, WITHOUT_TORCHVISION, chat, picture, process
from vlm_helpers import tiny_vlm as cached

NAMES = ["qwen2_5_vl", "qwen3_vl", "gemma4_vl", "gemma4_unified_vl", "minimax_m3_vl"]
QWEN = ["qwen2_5_vl", "qwen3_vl"]
IMAGE_TOKENS = {"qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>", "minimax_m3_vl": "]<]image[>["}
TOKENS_OF_SIZES = {"gemma4_vl": [64, 56, 64, 55], "gemma4_unified_vl": [64, 56, 64, 55]}


def features(model: PreTrainedModel, batch: BatchFeature) -> Tensor:
    """Those of all four layers [B, S, 4*H]."""
    inputs = dict(batch)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    target = HFDSparkTargetModel(model, [0, 1, 2, 3])
    return target.generate_batch(ids, mask, torch.ones_like(ids), **inputs).target_hidden_states


def test_the_families() -> None:
    assert list(TINY_VLMS) == NAMES
    with pytest.raises(ValueError) as error:
        build_tiny_vlm("llava")
    assert str(error.value) == f"there is no tiny vision-language target 'llava': known are {', '.join(NAMES)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_target(family: str) -> None:
    state = torch.random.get_rng_state()
    (model, processor), (again, _) = (build_tiny_vlm(family) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    text = model.config.get_text_config()
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == (4, 64, len(processor.tokenizer))
    assert processor.tokenizer.mask_token_id == 5 and processor.tokenizer.eos_token_id == text.eos_token_id
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 290).view(4, 72)).logits
    assert logits.std().item() == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_image_has_its_number_of_tokens(family: str) -> None:
    model, processor = cached(family)
    pictures = [picture(*size) for size in SOME_SIZES]
    batch = process(processor, [pictures[0], "and", *pictures[1:3]], ["Hi", pictures[3], "?"])
    token = processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKENS.get(family, "<|image|>"))
    assert token == model.config.image_token_id
    counts = TOKENS_OF_SIZES.get(family, [4, 3, 1, 10])
    assert (batch["input_ids"] == token).sum(dim=1).tolist() == [sum(counts[:3]), counts[3]]
    with torch.no_grad():
        assert model(**batch).logits.isfinite().all()  # which refuses another number of features


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_changes_the_features_from_its_place_on(family: str) -> None:
    model, processor = cached(family)
    one, other = (process(processor, ["Hi", picture(56, 56, seed), "?"]) for seed in (0, 1))
    changed = (features(model, one) - features(model, other))[0].abs().amax(dim=-1) > 1e-3
    first = (one["input_ids"][0] == model.config.image_token_id).nonzero()[0].item()
    assert not changed[:first].any() and changed[first:].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_the_pictures_of_another(family: str) -> None:
    if family == "minimax_m3_vl" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("its tower lets the images of a batch see each other in older versions")
    model, processor = cached(family)
    row = ["Hi", picture(56, 56), "?"]
    alone = features(model, process(processor, row))
    beside = features(model, process(processor, [picture(84, 28, seed=1), picture(28, 28, seed=2), "and"], row))
    torch.testing.assert_close(beside[1:, : alone.shape[1]], alone, rtol=0, atol=1e-5 * alone.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_features_are_those_of_the_model(family: str) -> None:
    model, processor = cached(family)
    batch = process(processor, [picture(56, 56), "?"], ["Hi", picture(84, 28), picture(28, 28, seed=1), "and so on"])
    with torch.no_grad():
        hidden_states = model(**batch, output_hidden_states=True).hidden_states
    # The model itself is given the mask here; the capture leaves it out, since padding only follows.
    ours, expected = features(model, batch), torch.cat(hidden_states[1:], dim=-1)
    for row, real in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
        assert_same(ours[row, :real], expected[row, :real])


@pytest.mark.parametrize("family", QWEN)
def test_positions_of_three_axes(family: str) -> None:
    """An image of 2 x 3 tokens takes as many positions as its longer side; nobody passes them."""
    model, processor = cached(family)
    side = 28 if family == "qwen2_5_vl" else 32
    batch = process(processor, ["Hi", picture(3 * side, 2 * side), "?"])
    start = (batch["input_ids"][0] == model.config.image_token_id).nonzero()[0].item()
    inputs = {name: batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")}
    positions, _ = model.base_model.get_rope_index(**inputs)
    assert (positions[:, 0, start : start + 7] - start).tolist() == [
        [0, 0, 0, 0, 0, 0, 3],
        [0, 0, 0, 1, 1, 1, 3],
        [0, 1, 2, 0, 1, 2, 3],
    ]
    computed = features(model, batch)
    assert torch.equal(features(model, BatchFeature({**batch, "position_ids": positions})), computed)
    flat = torch.arange(positions.shape[-1])[None]
    assert (features(model, BatchFeature({**batch, "position_ids": flat})) - computed).abs().max() > 0.1


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_writes_a_target_with_its_processor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "targets" / family
    monkeypatch.setattr(sys, "argv", ["tiny_vlm.py", family, str(folder)])
    tiny_vlm.main()
    assert capsys.readouterr().out.startswith(f"Wrote {folder}: ")

    model, processor = cached(family)
    loaded = load_target(str(folder))
    assert type(loaded) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    rows = [picture(56, 56), "and", picture(200, 100)], ["Hi", picture(84, 28)]
    saved, built = process(load_processor(str(folder)), *rows), process(processor, *rows)
    assert saved.keys() == built.keys()
    assert all(torch.equal(saved[name], built[name]) for name in built)


TEXTS = {
    "qwen2_5_vl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nSee "
    "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n",
    "qwen3_vl": "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n",
    "gemma4_vl": "<|turn>user\nSee <|image|><turn|>\n<|turn>model\nA cat.<turn|>\n",
    "gemma4_unified_vl": "<|turn>user\nSee <|image|><turn|>\n<|turn>model\nA cat.<turn|>\n",
    "minimax_m3_vl": "]~!b[]~b]user\nSee ]<]image[>[[e~[\n]~b]ai\nA cat.[e~[\n",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chat_template(family: str) -> None:
    _, processor = cached(family)
    messages = chat("See ", picture(56, 56), answer="A cat.")
    text = TEXTS[family]
    assert processor.apply_chat_template(messages, tokenize=False) == text
    prompt = processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == text[: text.index("A cat.")]

    tokenizer, tagged = processor.tokenizer, chat_template(family, generation_tags=True)
    assert "generation %}" not in tokenizer.chat_template
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=tagged, return_assistant_tokens_mask=True, return_dict=True
    )
    marked = [i for i, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert tokenizer.decode(marked) == "A cat." + TINY_VLMS[family].end

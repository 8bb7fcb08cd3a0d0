"""Targets that a device_map places: the features, weights and fingerprint are those of the whole target."""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.accelerate as placement
from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import dspark_lightning.module as module_file
import dspark_lightning.offload
from dspark_lightning.delivery import Delivery
from dspark_lightning.loading import load_target
from dspark_lightning.module import DSparkModule
from dspark_lightning.target import HFDSparkTargetModel
from fakes import tiny_trainer
from helpers import seeded, tiny_qwen3
from tiny_target import TINY_TARGETS, build_tiny_target

DISK: dict[str, int | str] = {"": "disk"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Gives the folder of a family's tiny target, written when it is first asked for."""
    root = tmp_path_factory.mktemp("targets")

    def folder(family: str) -> str:
        if not (root / family).exists():
            build_tiny_target(family).save_pretrained(root / family)
        return str(root / family)

    return folder


def token_ids() -> Tensor:
    return torch.randint(2, 240, (2, 24), generator=torch.Generator().manual_seed(0))


def assert_same(placed: PreTrainedModel, whole: PreTrainedModel) -> None:
    ours, theirs = (HFDSparkTargetModel(model, [-1, 0, 1, 3]) for model in (placed, whole))
    expected = theirs.generate_batch(token_ids(), None, token_ids())
    for _ in range(2):  # weights come and go with every forward
        batch = ours.generate_batch(token_ids(), None, token_ids())
        assert torch.equal(batch.target_hidden_states, expected.target_hidden_states)
        assert torch.equal(batch.target_last_hidden_states, expected.target_last_hidden_states)
    assert ours.fingerprint() == theirs.fingerprint()
    assert torch.equal(ours.embed_tokens.weight, theirs.embed_tokens.weight)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    last = expected.target_last_hidden_states
    assert torch.equal(ours.lm_head(last), theirs.lm_head(last))


def on_meta(model: PreTrainedModel) -> list[bool]:
    return [parameter.is_meta for parameter in model.parameters()]


@pytest.mark.parametrize("family", TINY_TARGETS)
def test_a_target_on_disk(family: str, folders: Callable[[str], str]) -> None:
    placed = load_target(folders(family), device_map=DISK)
    assert all(on_meta(placed))
    assert_same(placed, load_target(folders(family)))
    assert all(on_meta(placed))


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4", "deepseek_v4", "kimi_k25"])
def test_what_does_not_fit_into_memory_goes_to_disk(
    family: str, folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_target(folders(family))
    size = sum(parameter.nbytes for parameter in whole.parameters())
    monkeypatch.setattr(placement, "accelerate_max_memory", lambda limits=None: {"cpu": int(0.6 * size)})
    placed = load_target(folders(family), device_map="auto")
    assert set(placed.hf_device_map.values()) == {"cpu", "disk"}
    assert any(on_meta(placed)) and not all(on_meta(placed))
    assert_same(placed, whole)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_target_that_fits_is_an_ordinary_one(device_map: Any, folders: Callable[[str], str]) -> None:
    placed = load_target(folders("qwen3"), device_map=device_map)
    assert not any(on_meta(placed))
    assert_same(placed, load_target(folders("qwen3")))
    target = HFDSparkTargetModel(placed, [1])
    assert target.lm_head is placed.lm_head and target.embed_tokens is placed.model.embed_tokens


def test_the_dtype_holds_on_disk_too(tmp_path: Path) -> None:
    build_tiny_target("qwen3").bfloat16().save_pretrained(tmp_path)
    placed = load_target(str(tmp_path), device_map=DISK)
    assert HFDSparkTargetModel(placed, [1]).lm_head.weight.dtype == torch.float32
    assert_same(placed, load_target(str(tmp_path)))


def test_rewritten_weights_go_with_the_target(
    folders: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts lie in the file one by one and in the model fused, so they are written again."""
    source = folders("qwen3_moe")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    placed = load_target(source, device_map=DISK)
    assert len(list(tmp_path.glob("dspark-offload-*/*experts*"))) == 8  # two tensors in each of four layers
    del placed
    gc.collect()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError):
        load_target(source, device_map="fastest")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("fastest", r"\(device_map 'fastest'\): .* 'auto', .* but found fastest"),
        ({"": "floppy"}, r"\(device_map \{'': 'floppy'\}\): .* floppy"),
        ({}, r"^device_map \{\} gives the target no device: must be 'auto', a device such as 'cuda:0', or a mapping"),
        ("meta", r"^device_map 'meta' gives the target no device: must be 'auto'"),
        ({"model": "cpu", "lm_head": "meta"}, r"^device_map \{.*\} gives the target no device"),
    ],
)
def test_a_wrong_device_map_is_explained(device_map: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_target("embedded", device_map=device_map)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names a device that this machine has")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"target 'embedded' \(device_map 'cuda:0'\): ") as error:
        load_target("embedded", device_map="cuda:0")
    assert "\n" not in str(error.value)


def test_accelerate_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark_lightning.offload, "is_accelerate_available", lambda: False)
    with pytest.raises(ValueError) as error:
        load_target("embedded", device_map="auto")
    assert str(error.value) == "device_map 'auto' needs the package accelerate: pip install accelerate"


@pytest.mark.parametrize("change", ["missing", "reshaped"])
def test_weights_that_do_not_fit_are_refused(change: str, tmp_path: Path) -> None:
    build_tiny_target("qwen3").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    if change == "reshaped":
        weights["lm_head.weight"] = head[:5].contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight|shape"):
        _ = HFDSparkTargetModel(load_target(str(tmp_path), device_map=DISK), [1]).lm_head


def rows() -> list[dict[str, Tensor]]:
    ones = torch.ones(24, dtype=torch.int64)
    with seeded(3):
        ids = torch.randint(2, 240, (4, 24))
    return [
        {"input_ids": row, "attention_mask": ones, "loss_mask": ones, "row_id": torch.tensor(i)}
        for i, row in enumerate(ids)
    ]


def module(target: str, **changes: Any) -> DSparkModule:
    sizes = {"num_draft_layers": 1, "block_size": 3, "num_anchors": 4, "markov_rank": 8}
    return DSparkModule(target, **{"mask_token_id": 5, **sizes, **changes})


def fitted(tmp_path: Path, target: str, **changes: Any) -> DSparkModule:
    ours = module(target, **changes)
    tiny_trainer(tmp_path, max_steps=2).fit(ours, DataLoader(rows(), batch_size=2))  # type: ignore[arg-type]
    return ours


def test_training_does_not_depend_on_where_the_target_lies(folders: Callable[[str], str], tmp_path: Path) -> None:
    whole, placed = (fitted(tmp_path, folders("qwen3"), device_map=where) for where in (None, DISK))
    assert all(on_meta(placed.target.model)) and not any(on_meta(whole.target.model))
    ours, theirs = placed.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert placed.identity() == whole.identity()


def test_the_attention_implementation_reaches_the_target(folders: Callable[[str], str]) -> None:
    ours = module(folders("qwen3"), attn_implementation="eager")
    ours.configure_model()
    assert ours.target.model.config._attn_implementation == "eager"
    assert ours.hparams["attn_implementation"] == "eager" and ours.hparams["device_map"] is None


def test_several_processes_cannot_share_a_device_map(folders: Callable[[str], str]) -> None:
    ours = module(folders("qwen3"), device_map="auto")
    ours.trainer = Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError) as error:
        ours.load_target()
    assert str(error.value) == (
        "device_map 'auto' needs a single process, this machine runs 2, each of which would claim all devices: "
        "set trainer.devices to 1, or leave device_map out"
    )


@pytest.mark.parametrize(
    ("device_map", "dispatched", "moves"), [(None, False, True), (None, True, False), ("cpu", False, False)]
)
def test_a_placed_target_is_not_moved(
    device_map: str | None, dispatched: bool, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[nn.Module] = []
    monkeypatch.setattr(Delivery, "__call__", lambda self, part: moved.append(part))

    class Bringing(DSparkModule):
        def load_target(self) -> PreTrainedModel:
            model = tiny_qwen3()
            if dispatched:
                model.hf_device_map = {"": "cpu"}
            return model

    module = Bringing("tiny", mask_token_id=5, num_draft_layers=1, device_map=device_map)
    module.configure_model()
    assert module.target is not None
    assert (module.target.model in moved) == moves and (moves or not moved)


@pytest.mark.parametrize(("device_map", "reads"), [(None, False), ("auto", True)])
def test_each_process_places_its_own_target(
    device_map: str | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine each, perhaps: what is spread over devices is not sent around."""
    read: list[str] = []
    monkeypatch.setattr(module_file, "reads_for_others", lambda: False)
    monkeypatch.setattr(module_file, "load_target", lambda target, *args, **options: read.append(target))
    DSparkModule("embedded", mask_token_id=5, num_draft_layers=1, device_map=device_map).load_target()
    assert bool(read) == reads


def test_a_module_that_the_target_lacks_cannot_be_placed(folders: Callable[[str], str]) -> None:
    """accelerate would pass over the name, and put everything elsewhere than asked for."""
    with pytest.raises(ValueError, match=r"device_map places 'model\.layerz', which Qwen3ForCausalLM does not have"):
        load_target(folders("qwen3"), device_map={"": "cpu", "model.layerz": "disk"})


def test_a_tied_head_lies_beside_its_embedding(folders: Callable[[str], str]) -> None:
    model = load_target(folders("gemma4"), device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(ValueError, match=r"offloads 'lm_head\.weight', which shares its memory .* both on one device"):
        HFDSparkTargetModel(model, [1]).fingerprint()

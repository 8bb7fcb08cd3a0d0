"""Training from a feature cache: the numbers of training with the target, without the target."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule

import dspark_lightning.module as module_file
from dspark_lightning.datamodules import CachedFeatureDataModule, HybridFeatureDataModule, VLMDataModule
from dspark_lightning.embedded import embedded_data
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.fingerprint import files_digest
from dspark_lightning.features.stored_target import save_target_parts
from feature_helpers import fill, new_module, new_source, new_trainer, shards
from helpers import seeded


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("cache") / "features")


class Losses(Callback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []
        self.captured: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.training.append(float(outputs["terms"]["loss"]))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.validation.append(float(outputs["terms"]["loss"]))


def losses(datamodule: LightningDataModule, epochs: int = 1, **model: Any) -> Losses:
    record = Losses()
    trainer = new_trainer(max_epochs=epochs, callbacks=[record], num_sanity_val_steps=0)
    with seeded(0):
        trainer.fit(new_module(**model), datamodule=datamodule)
    return record


def no_target(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the target was loaded")


def test_losses_are_those_of_training_with_the_target(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = losses(new_source(), epochs=2)
    monkeypatch.setattr(module_file, "load_target", no_target)
    cached = losses(CachedFeatureDataModule(str(cache), batch_size=4), epochs=2)

    assert len(cached.training) == 20 and len(cached.validation) == 4
    assert cached.training == pytest.approx(online.training, abs=1e-3)
    assert cached.validation == pytest.approx(online.validation, abs=1e-3)
    assert cached.training != online.training  # of bf16 features


def test_a_hybrid_run_computes_in_its_first_epoch_and_reads_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dspark_lightning.datamodules.hybrid as hybrid_file

    runs: list[int] = []
    real = hybrid_file.capture
    monkeypatch.setattr(hybrid_file, "capture", lambda target, batch: runs.append(len(runs)) or real(target, batch))
    online = losses(new_source(), epochs=3)
    hybrid = losses(HybridFeatureDataModule(new_source(), str(tmp_path / "cache")), epochs=3)

    assert len(runs) == 10 + 2  # batches of the training and of the validation rows, once each
    assert hybrid.training == pytest.approx(online.training, abs=1e-3)
    assert hybrid.validation == pytest.approx(online.validation, abs=1e-3)
    assert FeatureCache(tmp_path / "cache").complete

    monkeypatch.setattr(module_file, "load_target", no_target)
    again = losses(HybridFeatureDataModule(new_source(), str(tmp_path / "cache")), epochs=3)
    assert again.training == hybrid.training  # computed or read makes no difference


def test_a_precomputed_cache_and_one_filled_by_training_hold_the_same(cache: Path, tmp_path: Path) -> None:
    losses(HybridFeatureDataModule(new_source(), str(tmp_path / "cache")))
    theirs, ours = FeatureCache(cache), FeatureCache(tmp_path / "cache")

    assert ours.manifest == theirs.manifest
    rows = ours.rows("train")
    for i in range(len(rows)):
        item = rows.encoded(i)
        asked = ("train", int(item["row_id"]), item["input_ids"], item["loss_mask"])
        for mine, other in zip(ours.read(*asked), theirs.read(*asked), strict=True):
            torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)  # one step of bf16, padded differently


def test_packs_are_read_from_the_cache_too(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {"packing": True, "max_length": 256, "batch_size": 2}
    online = losses(new_source(**packed), epochs=2)
    hybrid = losses(HybridFeatureDataModule(new_source(**packed), str(tmp_path / "cache")), epochs=2)
    monkeypatch.setattr(module_file, "load_target", no_target)
    cached = losses(CachedFeatureDataModule(str(cache), **packed), epochs=2)

    assert len(online.training) == 2 * 6  # 40 rows in 12 packs
    assert hybrid.training == pytest.approx(online.training, abs=1e-3)
    assert cached.training == pytest.approx(online.training, abs=1e-3)
    rows = FeatureCache(tmp_path / "cache").missing("train")
    assert len(rows) <= 4  # of the pack that fills no batch


def test_packs_of_a_cache_are_refused_for_a_target_that_would_mix_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_lightning.target._PACKABLE_LAYERS", ())
    with pytest.raises(ValueError, match=r"^rows cannot be packed for a .* target: .*; train on unpacked rows$"):
        CachedFeatureDataModule(str(cache), packing=True).setup("fit")


@pytest.mark.parametrize(
    ("source", "model", "field"),
    [
        ({"max_length": 64}, {}, "max_length 128, this run has 64"),
        ({"chat_template_kwargs": {"a": 1}}, {}, "template_options"),
        ({"supervise": "last"}, {}, "template_options"),
        ({"train_split": "train[:39]"}, {}, "data"),
        ({}, {"target_layer_ids": [1, 2]}, r"target_layer_ids \[1, 3\], this run has \[1, 2\]"),
    ],
)
def test_another_run_is_refused_with_both_values(
    cache: Path, source: dict[str, Any], model: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"was made with {field}"):
        losses(HybridFeatureDataModule(new_source(**source), str(cache)), **model)


def test_other_layers_are_refused_without_the_source(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"was made with target_layer_ids \[1, 3\], this run has \[2, 3\]"):
        losses(CachedFeatureDataModule(str(cache)), target_layer_ids=[2, 3])


def test_a_target_that_was_trained_further_is_refused_without_loading_it(cache: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from dspark_lightning.embedded import embedded_path

    target = tmp_path / "target"
    shutil.copytree(embedded_path(), target)
    losses(CachedFeatureDataModule(str(cache)), target=str(target))  # the same files elsewhere
    weights = {name: tensor * 1.01 for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"was made with target_files '.*', this run has '.*'"):
        losses(CachedFeatureDataModule(str(cache)), target=str(target))


def test_the_mask_token_must_not_be_in_the_cached_rows(cache: Path) -> None:
    used = int(FeatureCache(cache).rows("train").encoded(0)["input_ids"][3])

    with pytest.raises(ValueError, match=f"contains the mask_token_id {used}"):
        losses(CachedFeatureDataModule(str(cache), batch_size=4), mask_token_id=used)


@pytest.mark.parametrize("damage", ["cut", "flip", "lost"])
def test_damaged_shards_are_named_and_made_anew(
    cache: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    (shard,) = shards(copy)
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    if damage == "lost":
        shard.unlink()
    else:
        shard.write_bytes(whole[:5000] if damage == "cut" else bytes(flipped))
    reason = {"cut": "is damaged: it cannot be read", "flip": "checksum", "lost": "lacks 40 train rows"}[damage]
    with pytest.raises(ValueError, match=rf"{reason}.*dspark precompute (rebuilds|completes) it"):
        losses(CachedFeatureDataModule(str(copy), batch_size=4))

    if damage == "lost":
        fill(copy)
    else:
        with pytest.warns(UserWarning, match=f"{shard.name}' is damaged and will be computed again"):
            fill(copy)

    assert FeatureCache(copy).complete and not FeatureCache(copy).verify()
    assert shards(copy)[0].name == shard.name and shards(copy)[0].read_bytes() == whole


def test_a_hybrid_run_names_a_damaged_shard_too(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    (shard,) = shards(copy)
    shard.write_bytes(shard.read_bytes()[:100])

    with pytest.warns(UserWarning, match=f"{shard.name}' is damaged and will be computed again"):
        losses(HybridFeatureDataModule(new_source(), str(copy)))

    assert FeatureCache(copy).complete and not FeatureCache(copy).damaged


def test_parts_of_another_target_are_noticed(cache: Path, tmp_path: Path) -> None:
    for change in ("head", "config"):
        copy = tmp_path / change
        shutil.copytree(cache, copy)
        target = FeatureCache(copy).stored_target()
        if change == "head":
            save_target_parts(copy, "another cache", target.config, target.embedding, target.head)
        else:
            config = copy / "target" / "config.json"
            config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
        with pytest.raises(ValueError, match=r"is damaged: .*has the content hash .*, but it and config.json give"):
            losses(CachedFeatureDataModule(str(copy), batch_size=4))


def test_rows_that_changed_on_disk_are_noticed(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    rows = FeatureCache(copy).rows("train").table.map(lambda row, i: {"weight": 1.0 + (i == 7)}, with_indices=True)
    rows.save_to_disk(str(tmp_path / "changed"))
    shutil.rmtree(copy / "rows" / "train")
    (tmp_path / "changed").rename(copy / "rows" / "train")

    with pytest.raises(ValueError, match=r"is damaged: its train rows have the hash .*, the manifest says "):
        losses(CachedFeatureDataModule(str(copy), batch_size=4))


@pytest.mark.parametrize(("name", "value"), [("splits", {"val": {"rows": 8, "tokens": 1}}), ("pad_token_id", -1)])
def test_a_manifest_that_nothing_can_be_trained_from_is_refused(
    cache: Path, tmp_path: Path, name: str, value: Any
) -> None:
    content = json.loads((cache / "manifest.json").read_text()) | {name: value}
    (tmp_path / "manifest.json").write_text(json.dumps(content))

    with pytest.raises(ValueError, match=r"manifest.json' cannot be used: splits .* pad_token_id"):
        FeatureCache(tmp_path)


def test_weights_of_rows_are_kept(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in embedded_data("train").read_text().splitlines()[:30]]
    rows = [json.dumps(row | {"weight": 0.5 + i % 3}) + "\n" for i, row in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    source = {"train_data": str(tmp_path / "rows.jsonl"), "train_split": "train", "val_fraction": 0.2}
    source |= {"val_data": None, "val_split": None}
    fill(tmp_path / "cache", new_source(**source))
    online = losses(new_source(**source))
    cached = losses(CachedFeatureDataModule(str(tmp_path / "cache"), batch_size=4))

    assert cached.training == pytest.approx(online.training, abs=1e-3)
    assert cached.validation == pytest.approx(online.validation, abs=1e-3)
    (tmp_path / "rows.jsonl").write_text("".join(rows).replace('"weight": 2.5', '"weight": 3.5'))
    with pytest.raises(ValueError, match="was made with data"):
        losses(HybridFeatureDataModule(new_source(**source), str(tmp_path / "cache")))


def test_of_a_gguf_target_only_its_own_file_counts(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"a" * 100)
    digest = files_digest(str(tmp_path), "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"b" * 100)

    assert files_digest(str(tmp_path), "a.gguf") == digest != files_digest(str(tmp_path), "b.gguf")


def test_rows_with_nan_features_are_refused_by_name(cache: Path, tmp_path: Path) -> None:
    token = int(FeatureCache(cache).rows("train").encoded(6)["input_ids"][9])

    class Broken(type(new_module())):  # type: ignore[misc]
        def load_target(self) -> Any:
            model = super().load_target()
            with torch.no_grad():
                model.get_input_embeddings().weight[token] = torch.nan
            return model

    with pytest.raises(ValueError, match=r"NaN or infinite target_hidden_states of (train|val) row \d+, from token"):
        fill(tmp_path / "cache", new_source(), Broken(**dict(new_module().hparams)))

    assert not shards(tmp_path / "cache")


def test_a_cache_that_has_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    datamodule = HybridFeatureDataModule(new_source(), str(tmp_path / "cache"), limit_gb=0.001)

    with pytest.raises(ValueError, match=r"48 rows, [\d,]+ tokens of 773 bytes: \d\.\d\d MB, more than limit_gb 0.001"):
        losses(datamodule)

    assert not (tmp_path / "cache").exists()


def test_the_manifest_says_what_the_rows_are(cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    source = new_source()
    source.trainer = new_trainer()
    source.trainer.strategy._lightning_module = new_module()
    source.setup("fit")

    assert manifest["splits"]["train"] == {"rows": 40, "tokens": int(source.row_sets["train"].lengths().sum())}
    assert manifest["bytes_per_token"] == 2 * 3 * 128 + 5
    assert manifest["fingerprint"]["target_layer_ids"] == [1, 3]


@pytest.mark.slow
def test_rows_with_pictures_are_cached_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> VLMDataModule:
        splits = {"train_split": "train[:12]", "val_split": "train[:4]"}
        return VLMDataModule("embedded", "embedded", max_length=80, batch_size=4, **splits)

    model = {"target": "embedded-pictures", "target_layer_ids": None}
    fill(tmp_path / "cache", source(), new_module(**model))
    online = losses(source(), epochs=2, **model)
    monkeypatch.setattr(module_file, "load_target", no_target)
    cached = losses(CachedFeatureDataModule(str(tmp_path / "cache"), batch_size=4), epochs=2, **model)

    assert cached.training == pytest.approx(online.training, abs=1e-3)
    assert cached.validation == pytest.approx(online.validation, abs=1e-3)

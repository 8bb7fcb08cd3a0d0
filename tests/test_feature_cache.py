"""Parts of the feature cache by themselves: what is refused, what is stored, and when."""

import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dspark_lightning.datamodules import HybridFeatureDataModule, begin_cache
from dspark_lightning.embedded import embedded_path
from dspark_lightning.features import estimate
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.fingerprint import config_digest
from dspark_lightning.features.writer import FeatureWriter, documents
from dspark_lightning.target import DSparkTargetBatch
from feature_helpers import fill, new_module, new_source, new_trainer, shards


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("cache") / "features")


def test_a_digest_of_a_config_tells_targets_apart_and_not_their_places() -> None:
    config, elsewhere, changed = (AutoConfig.from_pretrained(embedded_path()) for _ in range(3))
    elsewhere._name_or_path = "elsewhere"
    changed.rms_norm_eps = 1e-4

    assert config_digest(config) == config_digest(elsewhere) != config_digest(changed)


def test_a_row_is_refused_for_other_tokens_or_another_mask(cache: Path) -> None:
    features = FeatureCache(cache)
    item = features.rows("train").encoded(4)
    row_id, ids, mask = int(item["row_id"]), item["input_ids"], item["loss_mask"]

    features.read("train", row_id, ids, torch.zeros_like(mask))  # it only fills up a batch
    with pytest.raises(ValueError, match=f"its row {row_id + 1} has other tokens than the data"):
        features.read("train", row_id, ids.flip(0), mask)
    with pytest.raises(ValueError, match=f"its row {row_id + 1} has another loss mask than the data"):
        features.read("train", row_id, ids, 1 - mask)


def test_packed_documents_without_a_row_take_their_place(cache: Path) -> None:
    host = {"seq_lens": torch.tensor([[3, 2, 4], [5, 0, 0]])}

    assert documents(host, torch.tensor([[7, -1, 9], [2, -1, -1]])) == [(0, 0, 3, 7), (0, 5, 9, 9), (1, 0, 5, 2)]


def captured(cache: Path, fill_with: float) -> tuple[dict[str, torch.Tensor], DSparkTargetBatch]:
    """The first training row as a batch, with features that are all the same."""
    item = FeatureCache(cache).rows("train").encoded(0)
    batch = {name: item[name][None] for name in ("input_ids", "loss_mask", "row_id")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    states = [torch.full((*batch["input_ids"].shape, width), fill_with) for width in (256, 128)]
    return batch, DSparkTargetBatch(states[0], states[1], batch["input_ids"], batch["loss_mask"], None, None)


def test_rows_that_are_there_are_not_stored_again(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    writer = FeatureWriter(FeatureCache(copy))
    writer.add("train", *captured(copy, 1.0))
    writer.flush()

    assert len(shards(copy)) == 1


def test_what_went_wrong_behind_the_target_is_raised_at_the_latest_when_flushed(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy, ignore=shutil.ignore_patterns("features"))
    writer = FeatureWriter(FeatureCache(copy))
    writer.add("train", *captured(copy, torch.inf))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"NaN or infinite target_hidden_states of train row \d+, from token 1 of"):
            writer.flush()
    with pytest.raises(ValueError, match="NaN or infinite"):
        writer.add("train", *captured(copy, 1.0))


def test_what_exceeds_the_free_space_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: usage(773 * 100))
    manifest = FeatureCache(cache).manifest

    assert "0.08 MB free" in estimate.check_size(cache, manifest, 100, None)
    with pytest.raises(ValueError, match=r"needs 0.08 MB more \(48 rows, .* but 0.08 MB are free there"):
        estimate.check_size(cache, manifest, 101, None)


def test_the_limit_holds_for_a_cache_that_was_begun(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy, ignore=shutil.ignore_patterns("features"))
    hybrid = HybridFeatureDataModule(new_source(), str(copy), limit_gb=0.001)

    with pytest.raises(ValueError, match=r"MB, more than limit_gb 0.001"):
        new_trainer(max_epochs=1).fit(new_module(), datamodule=hybrid)
    assert not shards(copy)


def test_of_two_runs_that_begin_a_cache_one_takes_what_the_other_has_begun(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def overtaken(folder: Path) -> Iterator[None]:
        shutil.copytree(cache, folder)
        yield

    monkeypatch.setattr(begin_cache, "alone_in", overtaken)
    fill(tmp_path / "cache")
    assert [path.stat().st_mtime_ns for path in shards(tmp_path / "cache")] == [
        path.stat().st_mtime_ns for path in shards(cache)
    ]

    with pytest.raises(ValueError, match="was made with max_length 128, this run has 64"):
        fill(tmp_path / "another", new_source(max_length=64))


def test_parts_of_the_target_take_the_dtype_that_it_would_be_loaded_in(cache: Path) -> None:
    stored = FeatureCache(cache).stored_target()
    parts = stored.to(torch.device("cpu"), torch.bfloat16)
    tied = replace(stored, head=stored.embedding).to(torch.device("cpu"), torch.bfloat16)

    assert parts.embedding.dtype == parts.head.dtype == torch.bfloat16
    assert tied.head is tied.embedding


def test_what_was_computed_is_kept_when_a_run_breaks_off(tmp_path: Path) -> None:
    class Breaks(type(new_module())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken off")
            return super().training_step(batch, batch_idx)

    hybrid = HybridFeatureDataModule(new_source(), str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="broken off"):
        new_trainer(max_epochs=1, limit_val_batches=0).fit(Breaks(**dict(new_module().hparams)), datamodule=hybrid)

    assert FeatureCache(tmp_path / "cache").lacks() == "8 val rows and 28 train rows"

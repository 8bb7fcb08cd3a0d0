"""What a run says about its draft: the last validation, held-out prompts, settings; and when nothing is decoded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import dspark_lightning.callbacks.draft_export as draft_export
from dspark_lightning.callbacks import AcceptanceMetrics, DraftExport
from dspark_lightning.serving.record import ExportRecord
from dspark_lightning.serving.run_record import held_out_prompts, kept_record, run_record
from fakes import FakeDSpark, fake_loader, fake_tau, tiny_trainer

NONE: frozenset[str] = frozenset()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, ExportRecord]:
    """Replace the exporter; the records it was given, by folder."""
    records: dict[str, ExportRecord] = {}
    monkeypatch.setattr(
        draft_export, "export_draft", lambda draft, path, weights, record: records.update({path.name: record})
    )
    return records


def fit(tmp_path: Path, callback: DraftExport, **arguments: Any) -> Trainer:
    options = {"max_epochs": 2, "enable_checkpointing": True} | arguments
    saving = ModelCheckpoint(tmp_path / "c", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = tiny_trainer(tmp_path, callbacks=[AcceptanceMetrics(), callback, saving], **options)
    trainer.fit(FakeDSpark(), fake_loader(0, 1), fake_loader(2, 3))
    return trainer


def test_a_record_names_the_step_of_the_validation_it_tells_of(
    tmp_path: Path, written: dict[str, ExportRecord]
) -> None:
    fit(tmp_path, DraftExport(str(tmp_path / "d")))
    validations = {name: record.validation for name, record in written.items()}
    assert {name: None if v is None else v.step for name, v in validations.items()} == {
        "dspark-step=1": None,  # that before the fit is no measurement
        "dspark-step=2": None,
        "dspark-step=3": 2,
        "dspark-step=4": 2,
        "dspark-draft": 4,
    }
    last = validations["dspark-draft"]
    assert last is not None and last.tau == pytest.approx(fake_tau(2, 3))
    assert last.acceptance == pytest.approx([0.5, 0.25])  # the terms of fake_terms, by position
    training = written["dspark-step=3"].training
    assert training is not None and training.steps == 3 and training.data is None
    assert training.settings == {
        **{"ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0},
        **{"optimizer": "SGD", "learning_rate": 0.1, "accumulate_grad_batches": 1, "ranks": 1},
        "precision": "32-true",
    }


def test_a_record_names_the_peak_of_the_learning_rate_and_all_ranks() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    counts = {"global_step": 5, "world_size": 4, "num_nodes": 2, "accumulate_grad_batches": 1, "precision": "32-true"}
    trainer = SimpleNamespace(datamodule=None, optimizers=[optimizer], **counts)
    record = run_record(trainer, SimpleNamespace(hparams={}), None, [])  # type: ignore[arg-type]
    assert record.training is not None and optimizer.param_groups[0]["lr"] == 0.1
    assert (record.training.settings["learning_rate"], record.training.settings["ranks"]) == (0.2, 4)


def test_the_record_is_in_the_checkpoint(tmp_path: Path, written: dict[str, ExportRecord]) -> None:
    fit(tmp_path, DraftExport(str(tmp_path / "d")))
    saved = torch.load(tmp_path / "c" / "step=3.ckpt", weights_only=True)["export_record"]
    assert saved["training"]["steps"] == 3 and saved["validation"]["step"] == 2 and saved["target"] == "a target"


def test_a_resumed_run_that_never_validates_keeps_what_was_known(
    tmp_path: Path, written: dict[str, ExportRecord]
) -> None:
    fit(tmp_path, DraftExport(str(tmp_path / "d")))
    path = tmp_path / "c" / "step=3.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["export_record"]["prompts"] = [[3, 4]]
    kept = kept_record(checkpoint)
    assert kept is not None and kept.validation is not None
    callback = DraftExport(str(tmp_path / "e"))
    callback.on_load_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert (callback._validation, callback._prompts) == (kept.validation, [[3, 4]])
    written.clear()
    trainer = tiny_trainer(tmp_path, callbacks=[DraftExport(str(tmp_path / "e"))], max_epochs=2, limit_val_batches=0)
    trainer.fit(FakeDSpark(), fake_loader(0, 1), fake_loader(2, 3), ckpt_path=str(path))
    record = written["dspark-draft"]
    assert record.training is not None and record.training.steps == 4 and record.validation == kept.validation


def test_a_damaged_record_in_a_checkpoint_is_one_line() -> None:
    assert kept_record({}) is None
    with pytest.raises(ValueError, match=r"^the export_record in the checkpoint has prompts 3, must be a list$"):
        kept_record({"export_record": {"prompts": 3}})


def test_a_folder_in_the_place_of_the_draft_is_refused_before_the_fit(tmp_path: Path) -> None:
    (tmp_path / "d" / "dspark-draft").mkdir(parents=True)
    (tmp_path / "d" / "dspark-draft" / "draft.gguf").write_text("")
    with pytest.raises(ValueError, match=r"holds 'draft\.gguf', so it is no earlier export"):
        fit(tmp_path, DraftExport(str(tmp_path / "d")))
    assert not (tmp_path / "c").exists()


def test_prompts_end_where_supervision_begins() -> None:
    ids = torch.tensor([[3, 7, 8, 9, 0], [3, 5, 6, 1, 0], [4, 4, 4, 0, 0], [5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "loss_mask": mask}
    assert held_out_prompts(batch, NONE) == [[3, 7], [3]]  # one row is all prompt, one has none
    assert held_out_prompts({**batch, "pixel_values": ids}, frozenset({"pixel_values"})) == []
    assert held_out_prompts({"input_ids": ids}, NONE) == held_out_prompts([ids], NONE) == []


def test_the_first_prompts_are_kept_and_no_more() -> None:
    callback = DraftExport()
    module = SimpleNamespace(target=None)
    trainer = SimpleNamespace(is_global_zero=True)
    for start in (0, 10, 20):
        ids = torch.arange(start, start + 9).view(3, 3)
        batch = {"input_ids": ids, "loss_mask": torch.tensor([[0, 0, 1]] * 3)}
        callback.on_validation_batch_start(trainer, module, batch, 0)  # type: ignore[arg-type]
    assert callback._prompts == [[0, 1], [3, 4], [6, 7], [10, 11]]


@pytest.mark.parametrize(
    ("split", "hparams", "prompts", "reason"),
    [
        (True, {}, [[1]], "the target is split over the ranks"),
        (False, {"device_map": "auto"}, [[1]], "the target is spread over devices"),
        (False, {}, [], "no validation has seen a held-out row that begins with a prompt"),
        (None, {}, [[1]], "this run does not load the target"),
    ],
)
def test_what_is_not_decoded_is_said(
    split: bool | None,
    hparams: dict[str, Any],
    prompts: list[list[int]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ranks that hold parts of a target would wait for each other for ever, and a huge one would take hours."""
    monkeypatch.setattr(draft_export, "is_sharded", lambda model: split)
    monkeypatch.setattr(draft_export, "keep_decoded", lambda *_: pytest.fail("decoded"))
    module = SimpleNamespace(target=None if split is None else SimpleNamespace(model=None), hparams=hparams)
    callback = DraftExport()
    callback._prompts = prompts
    callback._decode(SimpleNamespace(), module, Path("dspark-draft"))  # type: ignore[arg-type]
    way = ": dspark export --target adds it" if prompts else ""  # it could not without prompts either
    assert caplog.messages == [f"dspark-draft keeps no decoding to compare with, since {reason}{way}"]


@pytest.mark.parametrize("error", [ValueError("too long\nby far"), torch.OutOfMemoryError("too long")])
def test_a_decoding_that_fails_does_not_cost_the_draft(
    error: Exception, tmp_path: Path, written: dict[str, ExportRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(draft_export, "keep_decoded", fail)
    monkeypatch.setattr(draft_export, "_not_decodable", lambda *_: None)
    monkeypatch.setattr(
        FakeDSpark,
        "setup",
        lambda self, stage: setattr(self, "target", SimpleNamespace(model=None, media_arguments=NONE)),
    )
    with pytest.warns(UserWarning, match=r"keeps no decoding to compare with: too long$"):
        fit(tmp_path, DraftExport(str(tmp_path / "d")))
    assert "dspark-draft" in written


def test_a_validation_without_acceptance_is_none(tmp_path: Path, written: dict[str, ExportRecord]) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[DraftExport(str(tmp_path / "d"))], max_epochs=1)
    trainer.fit(FakeDSpark(), fake_loader(0), fake_loader(1))
    assert written["dspark-draft"].validation is None

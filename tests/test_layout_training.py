"""Training that starts from a folder of another tool."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from dspark_lightning import Qwen3DSpark, export_draft
from helpers import seeded, tiny_qwen3
from layout_helpers import ARGS, HEADS, WITH_HEADS, backbone_tensors, same_draft, write_dflash


class TinyDSpark(Qwen3DSpark):
    """Brings its target as an object, through the hook for that."""

    def load_target(self) -> PreTrainedModel:
        return tiny_qwen3()


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        del trainer, pl_module
        self.values.append(float(outputs["loss"]))


def row(number: int) -> dict[str, torch.Tensor]:
    with seeded(number):
        ids = torch.randint(3, 90, (24,))
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": ones, "loss_mask": ones, "row_id": torch.tensor(number)}


def fit(draft_init: Path | None, folder: Path, steps: int, **changes: Any) -> tuple[TinyDSpark, list[float]]:
    init = None if draft_init is None else str(draft_init)
    module, losses = (
        TinyDSpark(**{"target": "tiny", "draft_init": init, "warmup_ratio": 0.0, **ARGS, **changes}),
        Losses(),
    )
    trainer = Trainer(
        max_epochs=-1,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[losses],
    )
    trainer.fit(module, DataLoader([row(0), row(1)], batch_size=2))
    return module, losses.values


@pytest.fixture(scope="module")
def own_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of the first step from the folder that we export."""
    folder = tmp_path_factory.mktemp("own")
    return fit(export_draft(same_draft(), folder / "dspark"), folder, steps=1)[1][0]


@pytest.mark.parametrize("layout", WITH_HEADS)
def test_the_first_loss_is_that_of_our_own_folder(layout: str, own_loss: float, tmp_path: Path) -> None:
    assert fit(WITH_HEADS[layout](tmp_path / "draft"), tmp_path, steps=1)[1] == [own_loss]


def test_a_fresh_draft_has_another_loss(own_loss: float, tmp_path: Path) -> None:
    assert abs(fit(None, tmp_path, steps=1)[1][0] - own_loss) > 1e-3


def test_dflash_gives_the_backbone_and_the_heads_are_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, fresh, started = write_dflash(tmp_path / "draft"), TinyDSpark(target="tiny", **ARGS), None
    fresh.configure_model()
    with caplog.at_level(logging.INFO):
        started = TinyDSpark(target="tiny", draft_init=str(folder), **ARGS)
        started.configure_model()
    said = [record.getMessage() for record in caplog.records if "draft" in record.getMessage()]
    assert said == [f"{folder} has no markov_head and no confidence_head: new here, freshly initialised"]
    assert fresh.draft is not None and started.draft is not None
    given, new = backbone_tensors(), fresh.draft.state_dict()
    for name, tensor in started.draft.state_dict().items():
        from_folder = not name.startswith((*HEADS, "embed_tokens", "lm_head"))
        assert torch.equal(tensor, given[name].float() if from_folder else new[name])


def test_a_draft_from_dflash_trains(tmp_path: Path) -> None:
    every = 22  # anchors that there are in a row: the loss of each step is over the same blocks
    module, losses = fit(write_dflash(tmp_path / "draft"), tmp_path, steps=40, num_anchors=every)
    start = TinyDSpark(target="tiny", draft_init=str(tmp_path / "draft"), **ARGS)
    start.configure_model()
    assert start.draft is not None and module.draft is not None
    before, after = start.draft.state_dict(), module.draft.state_dict()
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith(("embed_tokens", "lm_head")), name
    assert losses[-1] < 0.95 * losses[0]

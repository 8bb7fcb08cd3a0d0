"""Decoding while a draft is trained gives the numbers of `dspark evaluate`, on one rank and on two."""

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from chat_helpers import datasets_cache  # noqa: F401
from dspark_lightning import Qwen3DSpark
from dspark_lightning.callbacks import DecodeAcceptance
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.evaluation.evaluate import evaluation_results, play_all, scalars
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.export import export_draft
from dspark_lightning.loading import load_target
from dspark_lightning.pretrained import load_pretrained_draft
from ranks_decode import OPTIONS, decode
from ranks_helpers import STRATEGIES, quiet_trainer, read_json, run_on_two_ranks


class Watch(Callback):
    """Notes at which steps something was logged, and the modes in which the draft then is."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.training: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if "val/tau_decode" in trainer.callback_metrics:
            self.steps.append(trainer.global_step)
        self.training.append(pl_module.draft.training)


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    module = Qwen3DSpark(target="embedded", mask_token_id=5, **OPTIONS)
    data = ChatDataModule("embedded", train_split="train[:16]", max_length=96, batch_size=2)
    trainer = quiet_trainer("alone", folder, limit_val_batches=0, callbacks=list(callbacks), **options)
    trainer.fit(module, data)
    return trainer


def test_it_decodes_every_n_optimizer_steps(tmp_path: Path) -> None:
    """Once a step, however many micro-batches it has; and training goes on as before."""
    watch, logger = Watch(), CSVLogger(tmp_path)
    callback = DecodeAcceptance("embedded", every_n_steps=2, limit=1, max_new_tokens=6)
    plain = Watch()
    fit(tmp_path, callback, watch, max_steps=4, accumulate_grad_batches=2, logger=logger)
    trainer = fit(tmp_path, plain, max_steps=4, accumulate_grad_batches=2)
    rows = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/tau_decode")
    step = rows[0].split(",").index("step")
    assert [row.split(",")[step] for row in rows[1:] if row.split(",")[column]] == ["1", "3"]
    assert watch.training == plain.training and len(plain.training) == 8
    assert "val/tau_decode" not in trainer.callback_metrics


def test_a_checkpoint_can_be_chosen_by_it(tmp_path: Path) -> None:
    chosen = ModelCheckpoint(tmp_path, monitor="val/tau_decode", mode="max", every_n_train_steps=2)
    callback = DecodeAcceptance("embedded", every_n_steps=2, limit=1, max_new_tokens=6)
    trainer = fit(tmp_path, callback, chosen, max_steps=2, enable_checkpointing=True)
    assert chosen.best_model_score == trainer.callback_metrics["val/tau_decode"]
    assert Path(chosen.best_model_path).exists()


def test_the_numbers_are_those_of_the_evaluation(tmp_path: Path) -> None:
    callback = DecodeAcceptance("embedded", every_n_steps=3, limit=4, max_new_tokens=16, temperature=1.0, seed=3)
    trainer = fit(tmp_path, callback, max_steps=3)
    draft = load_pretrained_draft(export_draft(trainer.lightning_module.draft.bfloat16(), tmp_path / "dspark"))
    settings = DecodeSettings(16, temperature=1.0, seed=3, compare=False)
    target = pair_up(load_target("embedded"), draft)
    player = Player(target, draft, ChatRenderer(load_tokenizer("embedded")), settings)
    results = evaluation_results(play_all(player, load_conversations("embedded", 4)), draft.block_size)
    # The exported weights are rounded, so a few random draws fall otherwise.
    logged = trainer.callback_metrics["val/tau_decode"].item()
    assert logged == pytest.approx(scalars(results["overall"])["tau_decode"], rel=0.1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_on_two_ranks("ranks_decode.py", folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return decode("alone", tmp_path_factory.mktemp("alone"))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_log_what_one_does(strategy: str, two_ranks: Path, one_rank: dict[str, Any]) -> None:
    """Also where target and draft are split, so that no rank can decode alone."""
    there = read_json(two_ranks / f"{strategy}.json")
    assert set(one_rank["fit"]) >= {"val/tau_decode", "val/acceptance_decode@1"}
    assert there["fit"] == pytest.approx(one_rank["fit"])
    assert there["test"] == pytest.approx(one_rank["test"])
    assert {name.removeprefix("test/") for name in one_rank["test"]} == {
        x.removeprefix("val/") for x in one_rank["fit"]
    }
    assert there["training"] == one_rank["training"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be 1 or more, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 (greedy) or at least 0.001, got -1.0"),
    ],
)
def test_wrong_values_are_refused_at_once(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        DecodeAcceptance("embedded", **options)


def test_missing_prompts_are_refused_before_training(tmp_path: Path) -> None:
    watch = Watch()
    with pytest.raises(ValueError, match=r"data 'gone\.jsonl', split 'train': no such file"):
        fit(tmp_path, DecodeAcceptance("gone.jsonl"), watch, max_steps=2)
    assert watch.training == []

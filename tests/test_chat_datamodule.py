import json
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from chat_helpers import CHATML, DEFAULT_SYSTEM, DROPS_REASONING, MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.embedded import embedded_data, embedded_path

Make = Callable[..., ChatDataModule]
ROWS = [chat(f"question {i}", f"the answer is {i}") for i in range(6)]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a datamodule on rows, with the byte tokenizer."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")

    def build(rows: list[Any] | str = ROWS, val_rows: list[Any] | None = None, **kwargs: Any) -> ChatDataModule:
        train = rows if isinstance(rows, str) else write_jsonl(tmp_path / "train.jsonl", rows)
        if val_rows is not None:
            kwargs["val_data"] = write_jsonl(tmp_path / "val.jsonl", val_rows)
        return ChatDataModule(train, **{"tokenizer": tokenizer, "mask_token_id": MASK_ID} | kwargs)

    return build


def fit(datamodule: ChatDataModule) -> ChatDataModule:
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def train_ids(datamodule: ChatDataModule) -> list[int]:
    return sorted(torch.cat([batch["row_id"] for batch in datamodule.train_dataloader()]).tolist())


def val_batches(datamodule: ChatDataModule) -> list[dict[str, torch.Tensor]]:
    return list(datamodule.val_dataloader())


def test_batches_hold_the_rows(make: Make) -> None:
    datamodule = fit(make(val_rows=ROWS[:3], batch_size=2))
    [first, second] = val_batches(datamodule)
    assert [batch["row_id"].tolist() for batch in (first, second)] == [[0, 1], [2]]
    text = "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\nthe answer is 0<|im_end|>\n"
    tokenizer = datamodule._encoder.renderer.tokenizer
    assert first["input_ids"][0, : first["attention_mask"][0].sum()].tolist() == tokenizer(text)["input_ids"]
    assert tokenizer.decode(first["input_ids"][0, first["loss_mask"][0].bool()]) == "the answer is 0<|im_end|>"
    trained = train_ids(datamodule)
    assert set(trained) < {3, 4, 5}  # 0 to 2 are validated on
    assert len(trained) == 2  # a batch of 2 leaves out one of three


def test_no_validation_data_is_no_error_in_fit(make: Make) -> None:
    assert fit(make()).val_dataloader() == []
    with pytest.raises(ValueError, match="no rows to validate on: set val_data"):
        Trainer(accelerator="cpu", logger=False).validate(Module(), datamodule=make())


def test_val_fraction_splits_without_leak(make: Make) -> None:
    rows = [chat(f"question {i}", f"the answer is {i}") for i in range(40)]
    datamodule = fit(make(rows + rows, val_fraction=0.25))
    validation = [int(batch["row_id"]) for batch in val_batches(datamodule)]
    assert sorted(validation + train_ids(datamodule)) == list(range(80))
    assert {row % 40 for row in validation}.isdisjoint(row % 40 for row in train_ids(datamodule))
    assert 2 <= len(validation) <= 38


def test_rows_with_too_little_supervision_are_dropped_after_cutting(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [chat("q", "four"), chat("q", "fiver"), chat("q" * 60, "far behind the question"), chat("q", "is cut" * 20)]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        datamodule = fit(make(rows, min_supervised_tokens=6, max_length=64))
    assert train_ids(datamodule) == [1, 3]
    assert (
        "4 rows read, 2 kept (dropped: 2 under 6 supervised tokens), 1 of them cut to max_length; 50 supervised"
        in caplog.text
    )
    assert caplog.text.count("rows read") == 1  # prepare_data and setup load once
    assert "assistant\n⟦fiver<|im_end|>⟧\n" in caplog.text
    assert max(batch["input_ids"].shape[1] for batch in datamodule.train_dataloader()) == 64


def test_every_row_format_and_tokenised_rows_in_one_file(make: Make) -> None:
    tokenised = {"input_ids": [10, 11, 12, 13], "loss_mask": [0, 1, 1, 1]}
    sharegpt = {
        "conversations": [{"from": "human", "value": "question 1"}, {"from": "gpt", "value": "the answer is 1"}]
    }
    datamodule = fit(make(ROWS, val_rows=[ROWS[0], sharegpt, tokenised]))
    assert train_ids(datamodule) == [2, 3, 4, 5]
    last = val_batches(datamodule)[2]
    assert last["input_ids"].tolist() == [[10, 11, 12, 13, 0, 0, 0, 0]]
    assert last["loss_mask"].tolist() == [[0, 1, 1, 1, 0, 0, 0, 0]]


def test_validate_and_test_read_the_validation_rows_only(make: Make) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    module = Module()
    trainer.validate(module, datamodule=make("missing.jsonl", val_rows=ROWS[:3]))
    assert module.rows == [0, 1, 2]
    datamodule = make(val_rows=ROWS[:2])
    datamodule.setup("test")
    assert [int(batch["row_id"]) for batch in datamodule.test_dataloader()] == [0, 1]


def test_slices_of_one_file_train_and_validate(make: Make) -> None:
    datamodule = fit(make([*ROWS, ROWS[0]], train_split="train[:4]", val_split="train[4:]"))
    assert [int(batch["row_id"]) for batch in val_batches(datamodule)] == [4, 5, 6]
    assert train_ids(datamodule) == [1, 2, 3]  # row 0 is row 6 again


def test_row_ids_count_from_the_start_of_the_file(make: Make) -> None:
    assert train_ids(fit(make(["", *ROWS], train_split="train[3:6]"))) == [3, 4, 5]


@pytest.mark.parametrize(
    ("change", "row", "message"),
    [
        ({}, {"messages": [{"role": "user", "content": "hi"}]}, r"train.jsonl:7: no assistant turn; .* \(1 bad rows"),
        ({}, "{broken", r"train.jsonl:7: not JSON: Expecting property name"),
        (
            {},
            chat("hi", "a <|mask|> in the text"),
            r"train.jsonl:7: token 23 of the row is '<\|mask\|>', the mask_token_id 2",
        ),
        ({"min_supervised_tokens": 99}, ROWS[0], "no row is left of train_data .*: 7 rows read, 0 kept"),
        ({"batch_size": 9}, ROWS[0], "7 training rows do not fill one global batch of 9"),
        ({"val_fraction": 1e-9}, ROWS[0], "no row is left of .*7 kept for training"),
        (
            {"tokenizer": "./no/where"},
            ROWS[0],
            r"^tokenizer './no/where': no such folder \(unless one is given, it is that of the model's target\)$",
        ),
        (
            {"tokenizer": "nobody/nothing"},
            ROWS[0],
            r"^tokenizer 'nobody/nothing' \(no folder here, so it was looked for on the hub\): ",
        ),
        ({"tokenizer": None}, ROWS[0], "^tokenizer is not set"),
        ({"mask_token_id": None}, ROWS[0], "^mask_token_id is not set and has no default"),
        ({"chat_template": sys.executable}, ROWS[0], "^chat_template '.*' cannot be read as UTF-8 text: "),
        ({"chat_template": "no.jinja"}, ROWS[0], "^chat_template 'no.jinja': no such file$"),
        (
            {},
            {"input_ids": [1, 999], "loss_mask": [0, 1]},
            "input_ids holds 999, but the tokenizer has the ids 0 to 261",
        ),
    ],
)
def test_unusable_data_is_named_in_one_line(make: Make, change: dict[str, Any], row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        fit(make([*ROWS, row], **change))
    assert "\n" not in str(error.value)


def test_a_template_that_rewrites_history_names_template_and_row(make: Make, tmp_path: Path) -> None:
    template = tmp_path / "qwen.jinja"
    template.write_text(DROPS_REASONING)
    with pytest.raises(ValueError, match=r"train.jsonl:7: no loss mask: \S+/qwen.jinja has no .* rewrites history"):
        fit(make([*ROWS, chat("a", "b", "c", "d")], chat_template=str(template)))


def test_bad_rows_are_skipped_up_to_a_limit(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROWS[0], "{broken", ROWS[1], {"messages": []}]
    with pytest.warns(UserWarning, match=r": 1 not JSON, the first: \S+train.jsonl:2: not JSON"):
        datamodule = fit(make(rows, max_bad_rows=2))
    assert train_ids(datamodule) == [0, 2]
    with pytest.raises(
        ValueError, match=r"train.jsonl:4: messages must be .* \(2 bad rows, max_bad_rows 1: 1 not JSON, 1 no turns\)$"
    ):
        fit(make(rows, max_bad_rows=1))


def test_a_changed_template_or_option_is_not_answered_from_the_cache(make: Make, tmp_path: Path) -> None:
    def length(**kwargs: Any) -> int:
        return int(next(iter(fit(make(ROWS[:1], **kwargs)).train_dataloader()))["attention_mask"].sum())

    template = tmp_path / "t.jinja"
    plain = length()
    lengths = []
    for text in (DEFAULT_SYSTEM, "{{ extra }}" + CHATML):
        template.write_text(text)
        lengths.append(length(chat_template=str(template), chat_template_kwargs={"extra": "12"}))
    assert length(chat_template=str(template), chat_template_kwargs={"extra": "1234"}) == plain + 4
    assert lengths == [plain + len("?system\nBe kind.?\n"), plain + 2]
    assert length() == plain


def test_the_cache_is_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fit(make())
    monkeypatch.setattr("dspark_lightning.datamodules.encode.parse_row", lambda record: pytest.fail("encoded again"))
    assert train_ids(fit(make(first.train_data))) == [0, 1, 2, 3, 4, 5]


def test_workers_and_pickling(make: Make) -> None:
    datamodule = fit(make(batch_size=2, num_workers=2, seed=4))
    plain = fit(make(batch_size=2, seed=4))
    for left, right in zip(datamodule.train_dataloader(), plain.train_dataloader(), strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
    loader = plain.train_dataloader()
    dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))  # as a spawned worker gets them
    assert torch.equal(collate([dataset[3]])["input_ids"], collate([loader.dataset[3]])["input_ids"])


class Module(LightningModule):
    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.rows += batch["row_id"].tolist()

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.rows += batch["row_id"].tolist()

    def configure_optimizers(self) -> None:
        return None


def run(datamodule: ChatDataModule, **hparams: Any) -> Module:
    module = Module(**hparams)
    Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
        module, datamodule=datamodule
    )
    return module


def test_what_is_left_out_comes_from_the_module(make: Make, tmp_path: Path) -> None:
    hparams = {"target": str(tmp_path / "tokenizer"), "mask_token_id": MASK_ID, "block_size": 8, "seed": 11}
    rows = [chat("q", "x" * (14 + i % 2)) for i in range(12)]  # 15 or 16 supervised tokens; 2 * 8 are needed
    datamodule = make(rows, tokenizer=None, mask_token_id=None)
    seen = run(datamodule, **hparams).rows
    assert sorted(seen) == [1, 3, 5, 7, 9, 11]
    same = make(rows, min_supervised_tokens=16, seed=11)
    assert seen == [int(batch["row_id"]) for batch in fit(same).train_dataloader()]
    other = make(rows, min_supervised_tokens=16, seed=12)
    assert seen != [int(batch["row_id"]) for batch in fit(other).train_dataloader()]


def test_two_mask_tokens_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="mask_token_id is 2 for the data, but 4 for the model"):
        run(make(), target="unused", mask_token_id=4)


def test_another_module_means_rows_of_another_tokenizer(make: Make, tmp_path: Path) -> None:
    datamodule = make(ROWS, tokenizer=None, mask_token_id=None)
    system = save_tokenizer(tmp_path / "system", DEFAULT_SYSTEM)
    previews = []
    for target in (str(tmp_path / "tokenizer"), system):
        run(datamodule, target=target, mask_token_id=MASK_ID)
        previews.append(datamodule.preview())
    assert previews[1] == "<|im_start|>system\nBe kind.<|im_end|>\n" + previews[0]


def test_ranks_share_the_rows(make: Make) -> None:
    seen = []
    for rank in (0, 1):
        datamodule = make(val_rows=[chat("q", f"validate {i}") for i in range(3)], seed=3)
        hparams = SimpleNamespace(hparams={})
        datamodule.trainer = SimpleNamespace(  # type: ignore[assignment]
            lightning_module=hparams,
            state=SimpleNamespace(fn=TrainerFn.FITTING),
            distributed_sampler_kwargs={"num_replicas": 2, "rank": rank},
            current_epoch=0,
            fit_loop=SimpleNamespace(
                epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0)))
            ),
        )
        fit(datamodule)
        seen.append((train_ids(datamodule), [int(batch["loss_mask"].sum()) for batch in val_batches(datamodule)]))
    assert sorted(seen[0][0] + seen[1][0]) == [0, 1, 2, 3, 4, 5]
    assert [val for _, val in seen] == [[11, 11], [11, 0]]  # the second rank's last row is a filler


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"max_bad_rows": -1}, "max_bad_rows must be at least 0, got -1"),
        ({"min_supervised_tokens": 0}, "min_supervised_tokens must be at least 2, got 0"),
        ({"supervise": "first"}, "supervise must be 'all' or 'last', got 'first'"),
        ({"supervise_roles": ["user"]}, "supervise_roles must hold assistant, .* system, .* tool, got \\['user'\\]"),
        ({"supervise_roles": ["assistant", "bot"]}, "roles out of system, .*, got \\['assistant', 'bot'\\]"),
        ({"supervise_roles": "assistant"}, "got 'assistant'"),
        (
            {"supervise_roles": ["assistant", "user"], "supervise": "last"},
            "supervise 'last' takes the last answer alone, but supervise_roles is .*: leave one of them out",
        ),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"val_fraction": 0.1, "val_data": "x.jsonl"}, "val_fraction 0.1 chooses .*, but so does val_data 'x.jsonl'"),
        ({"val_fraction": 0.1, "val_split": "test"}, "but so does val_split 'test': give one of them"),
    ],
)
def test_arguments_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatDataModule("train.jsonl", **change)


@pytest.mark.skipif(not embedded_path().exists(), reason="the embedded target is not built")
def test_the_embedded_target_and_its_rows() -> None:
    mask_token_id = load_tokenizer("embedded").mask_token_id
    datamodule = fit(ChatDataModule("embedded", "embedded", tokenizer="embedded", mask_token_id=mask_token_id))
    first = json.loads(embedded_data("heldout").read_text().splitlines()[0])["messages"]
    batch = val_batches(datamodule)[0]
    answers = load_tokenizer("embedded").decode(batch["input_ids"][0, batch["loss_mask"][0].bool()])
    assert answers.startswith(first[1]["content"] + "<|end|>")
    assert set(train_ids(datamodule)) <= set(range(len(embedded_data("train").read_text().splitlines())))

"""Rows read as a stream: which are trained, in which order, and what is refused."""

import logging
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lightning.pytorch import Trainer

from chat_helpers import MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import ChatDataModule, VLMDataModule
from dspark_lightning.datamodules.stream import PASS
from resume_helpers import Recorder

ROWS = [chat("question", f"answer {i}") for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def open_stream(data: str | Path, tokenizer: str, rank: int = 0, ranks: int = 1, **changes: Any) -> ChatDataModule:
    settings = {"tokenizer": tokenizer, "mask_token_id": MASK_ID, "stream_rows": 5, "batch_size": 2, "seed": 3}
    datamodule = ChatDataModule(str(data), **settings | changes)
    datamodule._replicas = lambda: {"num_replicas": ranks, "rank": rank}  # type: ignore[method-assign]
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def trained(datamodule: ChatDataModule, batches: int) -> list[int]:
    """Ids of the rows in the first batches."""
    return [row for batch in islice(datamodule.train_dataloader(), batches) for row in batch["row_id"].tolist()]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_pass_has_every_row_once_in_blocks(tmp_path: Path, tokenizer: str, num_workers: int) -> None:
    """23 rows in blocks of 5: what does not fill a batch of 2 goes into the next block, also that of the next pass."""
    data = open_stream(write_jsonl(tmp_path / "rows.jsonl", ROWS), tokenizer, num_workers=num_workers)
    rows = trained(data, 23)
    assert sorted(rows) == [*range(23), *(PASS + i for i in range(23))]
    firsts = [rows[4 * i + i // 2 * 2 :][:4] for i in range(2)]
    assert set(firsts[0]) < set(range(5)) and set(firsts[1]) < set(range(10))
    assert rows[:4] != sorted(rows[:4]) and rows != [*range(23), *(PASS + i for i in range(23))]
    assert [row % PASS for row in rows[:22]] != [row % PASS for row in rows[23:45]]
    assert trained(open_stream(data.train_data, tokenizer, seed=4), 23) != rows


def test_the_order_is_that_of_the_rows_and_not_of_the_files(tmp_path: Path, tokenizer: str) -> None:
    one = open_stream(write_jsonl(tmp_path / "all.jsonl", ROWS), tokenizer)
    for i, part in enumerate((ROWS[:9], ROWS[9:])):
        write_jsonl(tmp_path / f"part{i}.jsonl", part)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "all.parquet")
    assert trained(one, 30) == trained(open_stream(tmp_path / "part*.jsonl", tokenizer), 30)
    assert trained(one, 30) == trained(open_stream(tmp_path / "all.parquet", tokenizer), 30)


@pytest.mark.parametrize("files", [1, 2])
def test_ranks_share_the_rows(tmp_path: Path, tokenizer: str, files: int) -> None:
    """Where the files come out even, each rank has files of its own."""
    parts = [ROWS] if files == 1 else [ROWS[:10], ROWS[10:20]]
    for i, part in enumerate(parts):
        write_jsonl(tmp_path / f"part{i}.jsonl", part)
    streams = [open_stream(tmp_path / "part*.jsonl", tokenizer, rank, 2, batch_size=1) for rank in (0, 1)]
    counts = [12, 11] if files == 1 else [10, 10]
    seen = [trained(stream, count) for stream, count in zip(streams, counts, strict=True)]
    assert sorted(seen[0] + seen[1]) == list(range(sum(counts)))
    texts = [
        batch["input_ids"].sum().item()
        for s, n in zip(streams, counts, strict=True)
        for batch in islice(s.train_dataloader(), n)
    ]
    whole = open_stream(tmp_path / "part*.jsonl", tokenizer, batch_size=1)
    assert sorted(texts) == sorted(b["input_ids"].sum().item() for b in islice(whole.train_dataloader(), sum(counts)))


def test_each_block_has_an_order_of_its_own(tmp_path: Path, tokenizer: str) -> None:
    data = open_stream(write_jsonl(tmp_path / "rows.jsonl", ROWS[:20]), tokenizer, stream_rows=10, batch_size=10)
    first, second = (batch["row_id"].tolist() for batch in islice(data.train_dataloader(), 2))
    assert [row + 10 for row in first] != second and sorted(second) == list(range(10, 20))


def test_packs_are_made_in_each_block(tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        data = open_stream(path, tokenizer, packing=True, max_length=128, batch_size=1, stream_rows=10)
    assert "The first block of train_data" in caplog.text and "10 documents in 4 packs of 128 tokens" in caplog.text
    assert "⟦answer 0<|im_end|>⟧" in caplog.text and caplog.text.count("rows read") == 1
    batches = list(islice(data.train_dataloader(), 9))
    documents = [batch["doc_row_ids"].flatten().tolist() for batch in batches]
    assert sorted(row for pack in documents[:4] for row in pack) == list(range(10))
    assert sorted(row for pack in documents for row in pack) == list(range(23))
    assert max(batch["attention_mask"].sum().item() for batch in batches) <= 128


def test_validation_rows_and_rows_without_supervision_are_left_out(tmp_path: Path, tokenizer: str) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], chat("q", "a"), "", *ROWS[6:10]])
    val = write_jsonl(tmp_path / "val.jsonl", [ROWS[1], ROWS[8]])
    data = open_stream(rows, tokenizer, val_data=val, min_supervised_tokens=3, batch_size=1)
    assert sorted(trained(data, 8)) == [0, 2, 3, 4, 5, 8, 9, 11]
    assert [batch["row_id"].tolist() for batch in data.val_dataloader()] == [[0], [1]]


def test_bad_rows_are_named_and_counted_in_each_pass(tmp_path: Path, tokenizer: str) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:7], "{broken", *ROWS[7:12], "{broken too"])
    with pytest.warns(UserWarning, match=r"1 not JSON, the first: \S+rows.jsonl:8: not JSON"):
        data = open_stream(rows, tokenizer, max_bad_rows=2, stream_rows=9)
    assert len(set(trained(data, 18))) == 36  # three passes of 12
    for num_workers in (0, 1):
        data = open_stream(rows, tokenizer, max_bad_rows=1, num_workers=num_workers)
        with pytest.raises(
            ValueError, match=r"^\S+rows.jsonl:14: not JSON: .* \(2 bad rows, max_bad_rows 1: 2 not JSON\)$"
        ):
            trained(data, 18)


def test_a_bad_row_of_a_rank_with_files_of_its_own_is_named_by_its_number(tmp_path: Path, tokenizer: str) -> None:
    write_jsonl(tmp_path / "part0.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "part1.jsonl", [*ROWS[3:5], "{broken"])
    with pytest.raises(ValueError, match=r"part\*.jsonl \[train\], row 3 of rank 1: not JSON"):
        open_stream(tmp_path / "part*.jsonl", tokenizer, rank=1, ranks=2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pass_without_a_usable_row_ends_the_run(tmp_path: Path, tokenizer: str, num_workers: int) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS[:6])
    data = open_stream(rows, tokenizer, min_supervised_tokens=99, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"rows.jsonl \[train\]: no usable row in the 6 rows$"):
        trained(data, 1)
    data = open_stream(rows, tokenizer, rank=7, ranks=8)
    with pytest.raises(ValueError, match=r"no usable row in the 0 rows of rank 7$"):
        trained(data, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream_rows": 0}, "stream_rows must be at least 1, got 0"),
        ({"val_fraction": 0.1}, "from which val_fraction 0.1 cannot hold rows out: give val_data"),
        ({"train_split": "train[:9]"}, "which has no slices, but train_split is 'train[:9]': name a whole split"),
        ({"num_workers": 2}, "which has one reader on each rank: set num_workers to 0 or 1, got 2"),
        ({"train_data": "helpers:tiny_llama"}, "what a function returns is in memory and cannot be streamed"),
        ({"train_data": "rows.json"}, "rows.json is a JSON array, which cannot be streamed: make it JSON Lines"),
        ({"train_data": "nothing.jsonl"}, "no such file: expected .jsonl"),
        ({"train_split": "test"}, "files have the one split 'train'"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_one_line(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text("[]")
    arguments = {"data": "rows.jsonl", **change}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        open_stream(arguments.pop("train_data", arguments.pop("data")), tokenizer, **arguments)
    assert "\n" not in str(error.value)


def test_pictures_cannot_be_streamed() -> None:
    with pytest.raises(ValueError, match=r"^stream_rows is 9, but rows with pictures cannot be streamed"):
        VLMDataModule("embedded", stream_rows=9)


def test_a_stream_needs_a_number_of_steps(tmp_path: Path, tokenizer: str) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    data = ChatDataModule(rows, tokenizer=tokenizer, mask_token_id=MASK_ID, stream_rows=5)
    trainer = Trainer(accelerator="cpu", logger=False, max_epochs=3, enable_progress_bar=False)
    with pytest.raises(ValueError, match=r"^stream_rows 5 reads rows without end: set trainer.max_steps$"):
        trainer.fit(Recorder(), datamodule=data)


@pytest.mark.parametrize(
    ("when", "validations"),
    [({}, 1), ({"val_check_interval": 4}, 3), ({"val_check_interval": 4, "check_val_every_n_epoch": None}, 3)],
)
def test_an_epoch_is_the_run(tmp_path: Path, tokenizer: str, when: dict[str, Any], validations: int) -> None:
    class Counter(Recorder):
        count = 0

        def on_validation_end(self) -> None:
            self.count += 1

    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    data = ChatDataModule(rows, rows, tokenizer=tokenizer, mask_token_id=MASK_ID, stream_rows=5, batch_size=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    model, data.val_split = Counter(), "train[:1]"
    Trainer(accelerator="cpu", max_steps=6, accumulate_grad_batches=2, **quiet, **when).fit(model, datamodule=data)
    assert [epoch for epoch, _ in model.seen] == [0] * 12
    assert model.count == validations


@pytest.mark.parametrize(("weighted", "packing"), [(2, False), (7, False), (9, True)])
def test_weights_that_only_some_blocks_have_reach_the_batches(
    tmp_path: Path, tokenizer: str, weighted: int, packing: bool
) -> None:
    """Also beside rows that an earlier block left over, and the other way round."""
    rows = [row | {"weight": 0.5} if i == weighted else row for i, row in enumerate(ROWS)]
    options = {"packing": True, "max_length": 128, "batch_size": 3} if packing else {}
    data = open_stream(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer, **options)
    weights = {}
    for batch in islice(data.train_dataloader(), 23):
        mask, per_token = batch["attention_mask"], batch.get("loss_weights", batch["attention_mask"].float())
        for i, row_ids in enumerate(batch.get("doc_row_ids", batch["row_id"][:, None]).tolist()):
            lengths = batch["seq_lens"][i].tolist() if packing else [int(mask[i].sum())]
            for row_id, part in zip(
                row_ids, per_token[i].split([*lengths, mask.shape[1] - sum(lengths)]), strict=False
            ):
                if row_id >= 0:
                    weights.setdefault(row_id % PASS, set()).update(part.tolist())
    assert weights == {i: {0.5 if i == weighted else 1.0} for i in range(23)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_vanishes_is_named_in_one_line(tmp_path: Path, tokenizer: str, num_workers: int) -> None:
    path = Path(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    batches = iter(open_stream(path, tokenizer, num_workers=num_workers).train_dataloader())
    path.unlink()
    with pytest.raises(ValueError, match=r"^\S+rows.jsonl \[train\] cannot be read on: .*No such file.*$") as error:
        list(islice(batches, 23))
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list(ROWS).to_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    with pytest.raises(ValueError, match=r"rows.parquet \[train\] cannot be read on: ") as error:
        open_stream(path, tokenizer)
    assert "\n" not in str(error.value)

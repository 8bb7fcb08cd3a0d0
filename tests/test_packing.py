"""Packing: which documents share a pack, what a pack holds, and packs in training."""

import logging
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from chat_helpers import MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.anchors import context_doc_ids
from dspark_lightning.datamodules import ChatDataModule, VLMDataModule
from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.encode import FEATURES
from dspark_lightning.datamodules.packing import PackedRows, first_fit_decreasing, join_documents
from dspark_lightning.datamodules.rowset import RowSet
from packing_helpers import documents
from tiny_target import build_tiny_target


def packs_of(lengths: list[int], capacity: int) -> list[list[int]]:
    order, bounds = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    return [order[a:b].tolist() for a, b in pairwise(bounds)]


def first_fit_by_definition(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [pack for pack in packs if sum(lengths[j] for j in pack) + lengths[i] <= capacity]
        if fits:
            fits[0].append(i)
        else:
            packs.append([i])
    return packs


def test_each_document_goes_into_the_first_pack_with_room() -> None:
    """Next-fit would open a fourth pack for the second 3, best-fit would put the 2 beside the 7."""
    assert packs_of([3, 6, 2, 3, 7, 5], 10) == [[4, 0], [1, 3], [5, 2]]
    assert packs_of([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]
    assert packs_of([8], 8) == [[0]] and packs_of([], 8) == []


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), max_size=60), st.just(c))))
def test_packs_are_those_of_first_fit_decreasing(drawn: tuple[list[int], int]) -> None:
    assert packs_of(*drawn) == first_fit_by_definition(*drawn)


def test_a_pack_by_hand() -> None:
    first, second = documents(3, 2, first_row_id=7)
    first["loss_weights"], second["loss_weights"] = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.5, 0.0])
    pack = join_documents([first, second])
    assert pack["input_ids"].tolist() == [*first["input_ids"], *second["input_ids"]]
    assert pack["loss_mask"].tolist() == [0, 0, 0, 0, 0]
    assert pack["loss_weights"].tolist() == [0.5, 1.0, 2.0, 1.5, 0.0]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert pack["doc_remaining"].tolist() == [2, 1, 0, 1, 0]
    assert (pack["seq_lens"].tolist(), pack["doc_row_ids"].tolist(), int(pack["row_id"])) == ([3, 2], [7, 8], 7)


def test_a_batch_of_packs_by_hand() -> None:
    packs = [join_documents(documents(3, 2, first_row_id=7)), join_documents(documents(4, first_row_id=1))]
    for pack in packs:
        pack["loss_weights"] = torch.ones(len(pack["input_ids"]))
    batch = collate_rows(packs, pad_token_id=9, max_length=100)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["doc_remaining"].tolist() == [[2, 1, 0, 1, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["input_ids"][:, 5:].tolist() == [[9, 9, 9]] * 2
    assert (batch["seq_lens"].tolist(), batch["doc_row_ids"].tolist()) == ([[3, 2], [4, 0]], [[7, 8], [1, -1]])
    assert batch["row_id"].tolist() == [7, 1]
    assert batch["loss_weights"].tolist() == batch["attention_mask"].float().tolist()
    assert {x.dtype for name, x in batch.items() if name != "loss_weights"} == {torch.int64}
    numbers = context_doc_ids(batch["seq_lens"], 8, "cpu").tolist()
    assert numbers == [[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 2, 2, 2, 2]]  # padding is no part of a document


def test_the_packs_of_a_row_set_hold_each_kept_row_once() -> None:
    lengths = [5, 9, 2, 7, 3, 8]
    columns = {
        "row_id": list(range(10, 16)),
        "input_ids": [[i] * n for i, n in enumerate(lengths)],
        "loss_mask": [[1] * n for n in lengths],
        "supervised": lengths,
        "cut": [False] * 6,
        "weight": [1.0] * 5 + [0.5],
        "digest": list(range(6)),
        "id_digest": [0] * 6,
        "fault": [""] * 6,
        "error": [""] * 6,
    }
    rows = RowSet("data", Dataset.from_dict(columns, features=FEATURES), np.arange(6)).usable(3)
    packs = PackedRows.of(rows, 12)
    assert [packs[i]["doc_row_ids"].tolist() for i in range(len(packs))] == [[11, 14], [15], [13, 10]]
    assert packs[2]["input_ids"].tolist() == [3] * 7 + [0] * 5
    assert packs[1]["loss_weights"].tolist() == [0.5] * 8 and packs[2]["loss_weights"].tolist() == [1.0] * 12
    assert packs.summary() == "data: 5 documents in 3 packs of 12 tokens, 88.9 % filled"


ROWS = [chat("question", "answer " + "x" * (i % 7)) for i in range(12)]


def datamodule(folder: Path, **changes: Any) -> ChatDataModule:
    rows = write_jsonl(folder / "rows.jsonl", ROWS)
    settings = {"tokenizer": save_tokenizer(folder / "tokenizer"), "mask_token_id": MASK_ID, "packing": True}
    return ChatDataModule(rows, **settings | {"max_length": 128, "val_split": "train[:2]"} | changes)


def test_training_rows_are_packed_and_validation_rows_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        data = datamodule(tmp_path)
        data.prepare_data()
        data.setup("fit")
    [line] = re.findall(r"train_data \S+ \[train\]: (\d+) documents in (\d+) packs of 128 tokens", caplog.text)
    batches = list(data.train_dataloader())
    assert len(batches) == int(line[1])
    trained = [row for batch in batches for row in batch["doc_row_ids"].flatten().tolist()]
    identical = {i for i in range(12) if i % 7 in (0, 1)}  # to rows 0 and 1, which are validated on
    assert sorted(trained) == sorted(set(range(12)) - identical) and int(line[0]) == len(trained)
    for batch in batches:
        assert batch["input_ids"].shape[1] <= 128 and 1 <= batch["seq_lens"].shape[1] <= 3  # of 40 to 46 tokens each
        assert batch["attention_mask"].sum() == batch["seq_lens"].sum()
        assert batch["row_id"].tolist() == batch["doc_row_ids"][:, 0].tolist()
    assert [sorted(batch) for batch in data.val_dataloader()] == [
        ["attention_mask", "input_ids", "loss_mask", "row_id"]
    ] * 2


def test_packs_are_shared_out_and_resumed_as_rows_are(tmp_path: Path) -> None:
    data = datamodule(tmp_path, batch_size=2)
    data.setup("fit")
    packs, state = len(data._packs), data._sampler.state_dict(99) | {"batches": 1}
    assert state["num_rows"] == packs
    with pytest.raises(ValueError, match=f"num_rows {packs + 1}, this run has {packs}: resume with"):
        data.load_state_dict(state | {"num_rows": packs + 1})
    with pytest.raises(ValueError, match=r"pack_tokens 0 \(0: rows are not packed\), this run has 128: resume with 0"):
        data.load_state_dict({name: value for name, value in state.items() if name != "pack_tokens"})
    with pytest.raises(ValueError, match=f"^{packs} training packs do not fill one global batch of 99"):
        datamodule(tmp_path, batch_size=99).setup("fit")


@pytest.mark.parametrize("family", ["deepseek_v4", "minimax_m3_text"])
def test_a_target_that_would_mix_documents_is_refused_when_set_up(tmp_path: Path, family: str) -> None:
    build_tiny_target(family).config.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=r"^rows cannot be packed for a .* layers, whose .*; train on unpacked rows$"):
        with_module(datamodule(tmp_path), str(tmp_path / "target")).setup("fit")
    unknown = with_module(datamodule(tmp_path), "a name that only a module of one's own can load")
    unknown.setup("fit")  # it is for that module to refuse it


def with_module(data: ChatDataModule, target: str) -> ChatDataModule:
    module = SimpleNamespace(hparams={"target": target, "mask_token_id": MASK_ID})
    data.trainer = SimpleNamespace(lightning_module=module, distributed_sampler_kwargs={})  # type: ignore[assignment]
    return data


def test_pictures_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"^packing is true, but pictures cannot be packed"):
        VLMDataModule("embedded", packing=True)

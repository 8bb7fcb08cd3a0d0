from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from dspark_lightning.datamodules.encode import FEATURES
from dspark_lightning.datamodules.rowset import Dropped, RowSet
from dspark_lightning.datamodules.sampler import FILLER


def table(digests: list[int], **columns: list[Any]) -> Dataset:
    count = len(digests)
    filled: dict[str, list[Any]] = {
        "row_id": list(range(10, 10 + count)),
        "input_ids": [[digest % 7, 1] for digest in digests],
        "loss_mask": [[0, 1]] * count,
        "supervised": [5] * count,
        "cut": [False] * count,
        "weight": [1.0] * count,
        "digest": digests,
        "id_digest": [0] * count,
        "fault": [""] * count,
        "error": [""] * count,
    }
    return Dataset.from_dict(filled | columns, features=FEATURES)


def rows_of(name: str, encoded: Dataset) -> RowSet:
    return RowSet(name, encoded, np.arange(len(encoded)))


def row_ids(rows: RowSet) -> list[int]:
    return [int(row["row_id"]) for row in (rows[i] for i in range(len(rows)))]


def test_rows_are_dropped_and_counted_by_reason() -> None:
    encoded = table(
        [1, 2, 3, 4, 5, 6],
        supervised=[5, 0, 4, 6, 0, 0],
        fault=["", "not JSON", "", "", "blank lines", "not JSON"],
        error=["", "a:2: no", "", "", "", "a:6: no"],
    )
    rows = replace(rows_of("data", encoded), place="row {}".format).usable(5)
    assert row_ids(rows) == [10, 13]
    assert rows.summary() == (
        "data: 6 rows read, 2 kept (dropped: 2 not JSON, 1 blank lines, 1 under 5 supervised tokens), "
        "0 of them cut to max_length; 11 supervised tokens"
    )
    assert list(rows.losses()) == [
        ("2 not JSON, the first: a:2: no", True),
        ("1 blank lines, the first: row 14", False),
        ("1 under 5 supervised tokens, the first: row 12", False),
    ]


def test_of_rows_with_one_id_the_first_good_one_is_kept() -> None:
    rows = rows_of("data", table([1, 2, 3, 4, 5, 6], id_digest=[7, 0, 8, 7, 0, 8], fault=["", "", "bad", "", "", ""]))
    assert row_ids(rows.usable(0)) == [10, 11, 14, 15]
    assert rows.usable(0).dropped["with the id of an earlier row"] == Dropped(1, 3)


def test_rows_of_weight_0_are_dropped_and_other_weights_come_with_the_items() -> None:
    rows = rows_of("data", table([1, 2, 3], weight=[1.0, 0.0, 0.5])).usable(0)
    assert row_ids(rows) == [10, 12]
    assert rows.dropped == {"weight 0": Dropped(1, 1)}
    assert [rows[i]["loss_weights"].tolist() for i in (0, 1, FILLER)] == [[1, 1], [0.5, 0.5], [1, 1]]
    assert rows[0]["loss_weights"].dtype == torch.float32


def test_rows_that_all_weigh_1_have_no_weights() -> None:
    rows = rows_of("data", table([1, 2], weight=[1.0, 0.0])).usable(0)
    assert not rows.weighted
    assert "loss_weights" not in rows[0]


def test_items_are_int64_tensors_and_a_filler_supervises_nothing() -> None:
    rows = rows_of("data", table([9])).usable(0)
    item, filler = rows[0], rows[FILLER]
    assert {name: value.dtype for name, value in item.items()} == dict.fromkeys(item, torch.int64)
    assert (item["input_ids"].tolist(), item["loss_mask"].tolist(), int(item["row_id"])) == ([2, 1], [0, 1], 10)
    assert filler["loss_mask"].tolist() == [0, 0]
    assert rows[0]["loss_mask"].tolist() == [0, 1]


def test_training_rows_that_are_validation_rows_too_are_dropped() -> None:
    train = rows_of("train", table([1, 2, 3, 2])).usable(0).without_rows_of(rows_of("val", table([2, 9])).usable(0))
    assert row_ids(train) == [10, 12]
    assert train.dropped["identical to a validation row"] == Dropped(2, 1)


DIGESTS = [(i * 0x9E3779B97F4A7C15) % 2**64 - 2**63 for i in range(200)]


def test_split_follows_the_content_alone() -> None:
    train, val = rows_of("data", table(DIGESTS + DIGESTS[:50])).usable(0).split(0.3)
    assert not set(train.column("digest")) & set(val.column("digest"))
    assert len(train) + len(val) == 250
    assert len(set(val.column("digest"))) == pytest.approx(60, abs=10)
    backwards, _ = rows_of("data", table(DIGESTS[::-1])).usable(0).split(0.3)
    assert set(backwards.column("digest")) == set(train.column("digest"))


def test_a_larger_fraction_only_adds_validation_rows() -> None:
    rows = rows_of("data", table(DIGESTS)).usable(0)
    small, large = rows.split(0.1)[1], rows.split(0.4)[1]
    assert set(small.column("digest")) < set(large.column("digest"))
    assert len(rows.split(0.0)[1]) == 0

"""Rows that cannot be used: counted by what is wrong with them, named by file and line, and survived up to a limit."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chat_helpers import CHATML, MASK_ID, chat, save_tokenizer
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import ChatDataModule

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
GOOD = chat("question", "the answer")
USER, ASSISTANT = GOOD["messages"]

Make = Callable[..., ChatDataModule]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a datamodule on lines of a file, with the byte tokenizer and a strict template, and load its rows."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", STRICT)

    def build(lines: list[Any] | str, **options: Any) -> ChatDataModule:
        path = tmp_path / "a.jsonl"
        if isinstance(lines, list):
            encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
            path.write_bytes(b"".join(line + b"\n" for line in encoded))
        data = ChatDataModule(
            str(path) if isinstance(lines, list) else lines, tokenizer=tokenizer, mask_token_id=MASK_ID, **options
        )
        data.setup("fit")
        return data

    return build


def kept(data: ChatDataModule) -> list[int]:
    return sorted(int(batch["row_id"]) for batch in data.train_dataloader())


FAULTS: dict[str, tuple[Any, str]] = {
    "unknown role": ({"messages": [USER, {"role": "bot", "content": "x"}]}, "unknown role 'bot'; known are system, "),
    "refused by the template": ({"messages": [USER, USER, ASSISTANT]}, ".* refuses .*: roles must alternate"),
    "empty turn": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "the assistant turn is empty"),
    "content is no text": ({"messages": [USER, {"role": "assistant", "content": None}]}, ".* must be text, got None"),
    "unknown fields": ({"messages": None}, "expected messages, "),
    "no turns": ({"messages": []}, "messages must be a list of turns"),
    "null row": (None, "the row is null"),
    "malformed": ([1], "expected an object with the fields of a row, got list"),
    "no assistant turn": ({"messages": [USER]}, "no assistant turn"),
    "not JSON": (b'{"messages": [', "not JSON: "),
    "not UTF-8": (json.dumps(GOOD).encode().replace(b"answer", b"\xff"), "not UTF-8: byte 0xff"),
    "unusable input_ids": ({"input_ids": [1, 999], "loss_mask": [0, 1]}, "input_ids holds 999"),
    "unusable tools": (GOOD | {"tools": "{"}, "tools is text that is not JSON"),
    "bad weight": (GOOD | {"weight": -1}, "weight must be a number"),
}


@pytest.mark.parametrize(("kind", "line", "reason"), [(kind, *fault) for kind, fault in FAULTS.items()])
def test_every_fault_is_named_by_file_and_line(make: Make, kind: str, line: Any, reason: str) -> None:
    where = r"a\.jsonl:2: "
    with pytest.raises(ValueError, match=where + reason) as error:
        make([GOOD, line, GOOD])
    assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match=f"Left out of train_data .*: 1 {kind}, the first: .*{where}{reason}"):
        data = make([GOOD, line, GOOD], max_bad_rows=1)
    assert kept(data) == [0, 2]


def test_faults_are_counted_by_kind_with_an_example_of_each(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    role = {"messages": [{"role": "bot", "content": "x"}, ASSISTANT]}
    lines = [GOOD, role, b"{", b"", role | {"id": 1}, chat("a", "bcd", id=1), chat("e", "fgh", id=1), b"[", role, b" "]
    with pytest.warns(UserWarning) as warned, caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        data = make(lines, max_bad_rows=5)
    assert kept(data) == [0, 5]
    shown = [str(warning.message).partition("[train]: ")[2] for warning in warned]
    assert [re.sub(r"\S*/(?=a\.jsonl)", "", text) for text in shown if text] == [
        "3 unknown role, the first: a.jsonl:2: unknown role 'bot'; known are system, developer, user, assistant, tool "
        "(in from/value rows also human, gpt)",
        "2 not JSON, the first: a.jsonl:3: not JSON: Expecting property name enclosed in double quotes (column 2)",
    ]
    text = re.sub(r"\S*/(?=a\.jsonl)", "", caplog.text)
    assert "2 blank lines, the first: a.jsonl:4\n" in text
    assert "1 with the id of an earlier row, the first: a.jsonl:7\n" in text
    counts = "3 unknown role, 2 not JSON, 2 blank lines, 1 with the id of an earlier row"
    assert f"10 rows read, 2 kept (dropped: {counts}), 0 of them cut" in text


def test_one_bad_row_too_many_names_it_and_counts_all_kinds(make: Make) -> None:
    lines = [GOOD, b"{", {"messages": []}, b"[", {"messages": [USER]}, b"{"]
    with pytest.raises(ValueError, match=r"a\.jsonl:5: no assistant turn; .* \(4 bad rows, max_bad_rows 3: ") as error:
        make(lines, max_bad_rows=3)
    assert str(error.value).endswith("max_bad_rows 3: 2 not JSON, 1 no turns, 1 no assistant turn)")
    assert "\n" not in str(error.value)


def test_rows_of_every_format_in_one_file(make: Make) -> None:
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "the answer"}]
    tokenised = {"input_ids": [10, 11, 12], "loss_mask": [0, 1, 1]}
    data = make([{"conversations": turns}, {"prompt": "question", "response": "the answer"}, GOOD, tokenised])
    batches = {int(batch["row_id"]): batch for batch in data.train_dataloader()}
    assert sorted(batches) == [0, 1, 2, 3]
    assert batches[0]["input_ids"].tolist() == batches[1]["input_ids"].tolist() == batches[2]["input_ids"].tolist()


def test_parquet_with_nulls(make: Make, tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    table = pa.table(
        {
            "messages": pa.array(
                [GOOD["messages"], None, [USER, {"role": "assistant", "content": None}], None], pa.list_(turn)
            ),
            "prompt": pa.array([None, "question", None, None]),
            "response": pa.array([None, "the answer", None, None]),
            "weight": pa.array([None, 0.5, None, None]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match=r"1 content is no text, the first: \S+a\.parquet, row 3: "):
        data = make(str(tmp_path / "a.parquet"), max_bad_rows=2)
    weights = {int(batch["row_id"]): float(batch["loss_weights"].max()) for batch in data.train_dataloader()}
    assert weights == {0: 1.0, 1: 0.5}


def test_a_huge_row_is_cut_like_any_other(make: Make) -> None:
    data = make([GOOD, chat("q", "word " * 200_000), GOOD | {"id": 2}], max_length=64)
    [row] = [batch for batch in data.train_dataloader() if int(batch["row_id"]) == 1]
    assert row["input_ids"].shape == (1, 64)
    assert row["loss_mask"].tolist() == [[0] * 20 + [1] * 44]

"""`dspark data inspect`: numbers counted by hand, and rows as they are trained."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from rich.console import Console

from chat_helpers import MASK_ID, SPECIAL, byte_tokenizer, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.cli import main
from dspark_lightning.datamodules import CachedFeatureDataModule, ChatDataModule, HybridFeatureDataModule
from dspark_lightning.datamodules.preview import Piece, pieces
from dspark_lightning.datamodules.row_statistics import RowStatistics, histogram
from dspark_lightning.tools.inspect_data import Shown, inspect_data, parse_shown
from test_cli import CONFIGS

# <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n is 21 tokens long, and a newline ends the row.
ROWS = [
    chat("hi", "hello", id=1),  # 28 tokens, 6 supervised: blocks can start at 5 of them
    chat("hi", "yes", weight=0.5),  # 26 tokens, 4 supervised, 3 places
    chat("hi", "hello", id=1),
    "",
    {"messages": [{"role": "bot", "content": "x"}]},
    chat("hi", "a"),  # 24 tokens, 2 supervised, 1 place
    chat("hi", "x" * 60),  # cut to 64 tokens, 43 supervised, 42 places
    "{",
]


@pytest.fixture
def datamodule(tmp_path: Path) -> ChatDataModule:
    return ChatDataModule(
        write_jsonl(tmp_path / "train.jsonl", ROWS),
        val_data=write_jsonl(tmp_path / "val.jsonl", [chat("ho", "hello")]),
        tokenizer=save_tokenizer(tmp_path / "tokenizer"),
        mask_token_id=MASK_ID,
        max_length=64,
    )


def report(data: LightningDataModule, shown: Shown | None = None, **console: Any) -> str:
    stream = io.StringIO()
    inspect_data(data, shown or Shown(3, None, None), Console(**{"file": stream, "width": 80, **console}))
    return stream.getvalue()


def rows_shown(text: str) -> list[int]:
    return [int(line) for line in re.findall(r"── train row \S*train\.jsonl:(\d+)", text)]


def test_counts_by_hand(datamodule: ChatDataModule, tmp_path: Path) -> None:
    text = report(datamodule).replace(f"{tmp_path}/", "")
    train, val = text.split("── val rows: ")[0], text.split("── val rows: ")[1]
    assert "── train rows: train_data train.jsonl [train]\n" in train
    assert "8 rows read, 4 kept, 1 of them cut to 64 tokens\n" in train
    for line in (
        "1 blank lines, the first: train.jsonl:4",
        "1 unknown role, the first: train.jsonl:5: unknown role 'bot'; known are ",
        "1 not JSON, the first: train.jsonl:8: not JSON: ",
        "1 with the id of an earlier row, the first: train.jsonl:3",
    ):
        assert f"\n  {line}" in train
    assert "bad rows: 2, so that fit stops: max_bad_rows is 0\n" in train
    numbers = {line[:14].strip(): line[14:].split() for line in train.splitlines() if re.match(r" \w", line)}
    assert numbers["tokens"] == ["142", "24", "24", "26", "64", "64"]
    assert numbers["supervised"] == ["55", "2", "2", "4", "43", "43"]
    assert numbers["supervised, %"] == ["38.7", "8.3", "8.3", "15.4", "67.2", "67.2"]
    assert numbers["anchors"] == ["51", "1", "1", "3", "42", "42"]
    assert numbers["weight"] == ["3.5", "0.5", "0.5", "1", "1", "1"]
    assert re.search(r"^ +22-28 3 █{40} *$", train, re.MULTILINE)
    assert "1 rows read, 1 kept, 0 of them cut" in val
    assert "weight " not in val.split("── ")[0]


def test_rows_are_shown_as_they_are_trained(datamodule: ChatDataModule) -> None:
    text = report(datamodule)
    assert rows_shown(text) == [1, 2, 6]
    assert "train.jsonl:1: 28 tokens, 6 supervised\n<|im_start|>user\nhi<|im_end|>\n" in text
    assert "train.jsonl:2: 26 tokens, 4 supervised, weight 0.5\n" in text
    assert "assistant\n⟦hello<|im_end|>⟧\n" in text
    assert rows_shown(report(datamodule, Shown(1, None, None))) == [1]
    assert rows_shown(report(datamodule, Shown(0, None, None))) == []
    assert rows_shown(report(datamodule, Shown(3, 7, None))) == [7]
    draws = {tuple(rows_shown(report(datamodule, Shown(2, None, seed)))) for seed in range(8)}
    assert len(draws) > 1 and all(len(set(drawn)) == 2 for drawn in draws)
    assert len({tuple(rows_shown(report(datamodule, Shown(2, None, 5)))) for _ in range(3)}) == 1
    with pytest.raises(ValueError, match=r"^--row 5 is not among the rows kept: what was dropped"):
        report(datamodule, Shown(3, 5, None))


def test_colours_on_a_terminal_and_marks_elsewhere(datamodule: ChatDataModule) -> None:
    coloured = report(datamodule, force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[32mh\x1b[0m" in coloured and "\x1b[1;32m<|im_end|>\x1b[0m" in coloured
    assert "⟦" not in coloured
    assert "⟦hello<|im_end|>⟧" in re.sub("\x1b\\[[0-9;]*m", "", report(datamodule, force_terminal=True, no_color=True))


def test_narrow_terminals(datamodule: ChatDataModule) -> None:
    bars = [line for line in report(datamodule, width=40).splitlines() if "█" in line or "##" in line]
    assert bars and all(len(line.rstrip()) <= 40 for line in bars)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    data = ChatDataModule(
        write_jsonl(tmp_path / "a.jsonl", [chat("hi", "\x1b[31mred\x07")]),
        tokenizer=save_tokenizer(tmp_path / "tokenizer"),
        mask_token_id=MASK_ID,
    )
    assert r"⟦\x1b[31mred\x07<|im_end|>⟧" in report(data)


def test_other_datamodules_are_refused() -> None:
    with pytest.raises(
        ValueError, match="rows of a LightningDataModule cannot be shown: data must be a ChatDataModule"
    ):
        report(LightningDataModule())


def test_pieces_are_tokens_or_whole_characters() -> None:
    tokenizer = byte_tokenizer()
    ids = torch.tensor([SPECIAL.index("<|im_start|>"), *tokenizer("é漢")["input_ids"], *tokenizer("a")["input_ids"]])
    assert len(ids) == 1 + 2 + 3 + 1
    found = list(pieces(tokenizer, ids, torch.tensor([0, 0, 0, 1, 1, 1, 0])))
    assert found == [
        Piece("<|im_start|>", False, True),
        Piece("é", False, False),
        Piece("漢", True, False),
        Piece("a", False, False),
    ]
    torn = list(pieces(tokenizer, ids, torch.tensor([0, 1, 0, 0, 0, 0, 0])))  # of a row that came tokenised
    assert [(piece.text, piece.supervised) for piece in torn[1:3]] == [("\ufffd", True), ("\ufffd漢", False)]


def test_statistics_and_histogram_by_hand(datamodule: ChatDataModule) -> None:
    datamodule.max_bad_rows = 2
    with pytest.warns(UserWarning, match="Left out of"):
        datamodule.prepare_data()
    numbers = RowStatistics.of(datamodule.row_sets["train"])
    assert numbers.tokens.tolist() == [28, 26, 24, 64]
    assert numbers.supervised.tolist() == [6, 4, 2, 43]
    assert numbers.anchors.tolist() == [5, 3, 1, 42]
    assert numbers.weights.tolist() == [1, 0.5, 1, 1]
    assert histogram(np.array([0, 1, 3, 4, 10]), 5) == [(1, 2, 2), (3, 4, 2), (5, 6, 0), (7, 8, 0), (9, 10, 1)]
    assert histogram(np.array([1, 1]), 10) == [(1, 1, 2)]


def test_anchors_do_not_reach_into_the_next_row(tmp_path: Path) -> None:
    masks = [[1, 1], [1, 1, 0, 1], [1, 1, 1]]
    rows = [{"input_ids": [40 + i for i in range(len(mask))], "loss_mask": mask} for mask in masks]
    data = ChatDataModule(
        write_jsonl(tmp_path / "a.jsonl", rows), tokenizer=save_tokenizer(tmp_path / "tokenizer"), mask_token_id=MASK_ID
    )
    data.prepare_data()
    assert RowStatistics.of(data.row_sets["train"]).anchors.tolist() == [1, 1, 2]


def test_the_command_takes_what_fit_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = next(str(path) for path in CONFIGS if path.stem == "quickstart")
    rows = write_jsonl(tmp_path / "mine.jsonl", [chat("Who is it?", "It is Igor from the garden."), {"prompt": 3}])
    main(
        [
            *("data", "inspect", "--config", config, "--rows=1", "--data.init_args.train_data", rows),
            *("--data.init_args.val_data=null", "--model.init_args.num_anchors=4", "--model.init_args.block_size=2"),
            *("--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.precision=bf16-mixed"),  # another machine
        ]
    )
    printed = capsys.readouterr().out
    assert "2 rows read, 1 kept" in printed and "mine.jsonl:2: expected messages, " in printed
    assert "1 of 1 rows have places for num_anchors 4 blocks" in printed
    assert "<|user|>Who is it?<|end|><|assistant|>⟦It is Igor from the garden.<|end|>⟧" in printed
    assert not list(tmp_path.glob("runs"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "--rows", "-1"], "--rows must be 0 or more, got -1"),
        (["inspect", "--random", "-1"], "--random must be 0 or more, got -1"),
        (["look"], "there is no command 'data'; known are fit, .*, data inspect.*"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["data", *args])
    assert error.value.code == 2
    assert re.fullmatch(f"dspark: error: {message}\n", capsys.readouterr().err)


def test_own_options_are_taken_out_of_the_command_line() -> None:
    args = ["--config", "a.yaml", "--rows", "5", "--random=3", "--data.init_args.max_length", "9"]
    assert parse_shown(args) == (
        Shown(5, None, 3),
        ["--config", "a.yaml", "--data.init_args.max_length", "9"],
    )


def test_of_a_stream_the_first_block_is_shown(datamodule: ChatDataModule) -> None:
    datamodule.stream_rows = 2
    text = report(datamodule)
    assert "train.jsonl [train], the first block\n2 rows read, 2 kept" in text
    assert rows_shown(text) == [1, 2] and "── val rows: val_data" in text


def test_of_a_cache_that_is_filled_the_source_is_shown(tmp_path: Path) -> None:
    source = ChatDataModule("embedded", tokenizer="embedded", mask_token_id=5, train_split="train[:3]", max_length=128)
    console = Console(file=io.StringIO(), width=80)
    inspect_data(HybridFeatureDataModule(source, str(tmp_path / "none")), Shown(1, None, None), console)
    assert "3 rows read, 3 kept" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not (tmp_path / "none").exists()

    with pytest.raises(ValueError, match="rows of a CachedFeatureDataModule cannot be shown"):
        inspect_data(CachedFeatureDataModule(str(tmp_path / "none")), Shown(1, None, None))

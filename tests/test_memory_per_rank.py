"""The formula of memory per rank, against numbers worked out by hand and against what ranks really hold."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memory_per_rank import (
    Setting,
    build_pair,
    describe,
    gathered_bytes,
    held_bytes,
    main,
    shard_bytes,
    step_bytes,
    table,
)
from ranks_helpers import read_json, run_on_two_ranks
from ranks_memory import DRAFT, PRECISIONS, RUNS

TOLERANCE = 0.001
"""Share by which measured and computed bytes may differ; all but the rounding of shards is exact."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("strategy", "unit", "expected"),
    [
        ("fsdp2", [empty(7, 3)], 4 * 3 * 4),  # 4 of 7 rows
        ("fsdp2", [empty(1), empty(8, 2)], 4 + 4 * 2 * 4),  # nothing is left of the first for the other rank
        ("fsdp", [empty(3), empty(5)], (4 + 5 + 1) // 2 * 4),  # 12 bytes become 16; 9 numbers become 10
        ("fsdp", [empty(8), empty(8), empty(3, dtype=torch.bfloat16)], 8 * 4 + 6),  # the other dtype stays whole
    ],
)
def test_shards_are_padded_as_torch_pads_them(strategy: str, unit: list[torch.Tensor], expected: int) -> None:
    assert shard_bytes(unit, Setting(2, strategy)) == expected


def test_the_parts_add_up() -> None:
    pair = build_pair("embedded", "bf16-mixed", DRAFT)
    parameters = sum(p.numel() for p in pair.target.parameters())
    trained = sum(p.numel() for p in pair.draft.parameters() if p.requires_grad)
    vocabulary, hidden = pair.draft.lm_head.weight.shape

    one = held_bytes(pair, Setting(1, "ddp"))
    assert one["target: weights"] == 2 * parameters and one["draft: trained weights"] == 4 * trained
    assert sum(one.values()) == pytest.approx(2 * parameters + 16 * trained, rel=TOLERANCE)

    split = held_bytes(pair, Setting(4, "fsdp2"))
    head = 2 * vocabulary * hidden
    assert split["target: weights"] == pytest.approx((2 * parameters - head) / 4, rel=TOLERANCE)
    assert split["draft: frozen embedding and head"] == 2 * head / 4
    assert split["draft: AdamW's two states"] == pytest.approx(8 * trained / 4, rel=TOLERANCE)
    assert gathered_bytes(pair, Setting(4, "fsdp2"))["target: root and largest unit"] == 2 * hidden + max(
        head, max(2 * sum(p.numel() for p in layer.parameters()) for layer in pair.target.model.layers)
    )
    assert not any(gathered_bytes(pair, Setting(4, "ddp")).values())

    features, last, chunk, _ = step_bytes(pair, Setting(1), tokens=10).values()
    assert (features, last, chunk) == (10 * 2 * hidden * 2, 10 * hidden * 2, 2048 * vocabulary * 2)
    printed = describe(pair, Setting(4, "fsdp2", replicate_target=True), tokens=10)
    assert "whole" in printed and "features [10, 256]" in printed


@pytest.mark.parametrize(
    ("options", "first_lines"),
    [
        (["quickstart.yaml"], ["0.001 B", "ddp, 32-true, 2 ranks"]),
        (["quickstart.yaml", "strategy/fsdp2.yaml"], ["split", "fsdp2, 32-true, 2 ranks"]),
        (["quickstart.yaml", "strategy/fsdp.yaml"], ["split", "fsdp, 32-true, 2 ranks"]),
    ],
)
def test_configurations_and_overlays_are_read_as_the_command_reads_them(
    options: list[str], first_lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = Path(__file__).parent.parent / "configs"
    given = [word for name in options for word in ("--config", str(configs / name))]
    monkeypatch.setattr("sys.argv", ["memory_per_rank", *given, "--ranks", "2"])
    main()
    printed = capsys.readouterr().out.splitlines()
    assert all(expected in line for expected, line in zip(first_lines, printed, strict=False))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--target", "./nowhere"], "target './nowhere' does not exist"),
        (["--target", "embedded", "--ranks", "0"], "--ranks must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_read_ends_with_one_line(
    options: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["memory_per_rank", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert error in f"{stop.value}{capsys.readouterr().err}"


def test_the_page_has_the_table_that_is_printed() -> None:
    """But for the last digit, in which versions of transformers differ: some keep another buffer."""
    page = (Path(__file__).parent.parent / "docs" / "many_ranks.md").read_text()
    printed = table()
    shown = page[page.index(printed.splitlines()[0]) :][: len(printed)]
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("", shown) == number.sub("", printed)
    there, here = ([float(text) for text in number.findall(text)] for text in (shown, printed))
    assert there == pytest.approx(here, abs=0.11)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks held in every way of training."""
    folder = tmp_path_factory.mktemp("held")
    run_on_two_ranks("ranks_memory.py", folder)
    return [read_json(folder / f"rank{rank}.json") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("strategy", "where"), RUNS)
def test_ranks_hold_what_the_formula_says(
    strategy: str, where: str, precision: str, measured: list[dict[str, Any]]
) -> None:
    setting = Setting(2, strategy, precision, replicate_target=where == "whole")
    expected = held_bytes(build_pair("embedded", precision, DRAFT), setting)
    for facts in measured:
        there = facts[f"{strategy} {precision} {where}"]
        assert there["held"] == {name: pytest.approx(size, rel=TOLERANCE) for name, size in expected.items()}
        # Batches, metrics, step counts: no copy of anything large has been forgotten.
        assert there["others"] < 0.01 * sum(expected.values()), there["largest"]

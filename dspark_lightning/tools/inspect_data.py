"""`dspark data inspect`: the rows a configuration trains on, as they are trained, with counts and lengths."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_lightning.datamodules import CachedFeatureDataModule, ChatDataModule, HybridFeatureDataModule
from dspark_lightning.datamodules.preview import Piece, pieces
from dspark_lightning.datamodules.row_statistics import RowStatistics, histogram
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.usage import OwnOptions

_BINS, _LONGEST_BAR = 10, 40
_QUANTILES = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
_STYLES = {(True, True): "bold green", (True, False): "green", (False, True): "magenta", (False, False): ""}
"""Of a piece, by whether it is supervised and whether it is a special token."""


@dataclass(frozen=True)
class Shown:
    """Which rows are shown."""

    count: int  # of the training rows and of the validation rows
    row: int | None  # the one with this number instead, from 1
    seed: int | None  # draws them instead of taking the first


def parse_shown(args: Sequence[str]) -> tuple[Shown, list[str]]:
    """Take this command's own options out of a command line; the rest is that of `dspark fit`.

    Raises:
        ValueError: An option that cannot be used.
    """
    parser = OwnOptions(
        prog="dspark data inspect",
        description="Show the rows that `dspark fit` would train on with the same options: which are kept, how long "
        "they are, and what is supervised.",
        epilog="All other options are those of `dspark fit`: --config my.yaml --data.init_args.max_length 512 ...",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="show so many rows (default: 3)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--row", type=int, metavar="N", help="show the N-th row of the data instead, counted from 1")
    which.add_argument(
        "--random", type=int, metavar="SEED", help="draw the rows from this seed; else they are the first"
    )
    own, rest = parser.parse_known_args(args)
    if own.rows < 0:
        raise ValueError(f"--rows must be 0 or more, got {own.rows}")
    if own.random is not None and own.random < 0:
        raise ValueError(f"--random must be 0 or more, got {own.random}")
    return Shown(own.rows, own.row, own.random), rest


def inspect_data(datamodule: LightningDataModule, shown: Shown, console: Console | None = None) -> None:
    """Load the rows of a datamodule and print what they are.

    Args:
        datamodule: Attached to a trainer whose module is built, or with all settings of its own. Bad rows are counted
            without a limit. Of a stream the first block is read.
        shown: Which rows are printed.
        console: Default: standard output.

    Raises:
        ValueError: Data that cannot be used, or a row that is not there.
    """
    if isinstance(datamodule, HybridFeatureDataModule):
        datamodule.source.trainer, datamodule = datamodule.trainer, datamodule.source
    if not isinstance(datamodule, ChatDataModule) or isinstance(datamodule, CachedFeatureDataModule):
        raise ValueError(
            f"rows of a {type(datamodule).__name__} cannot be shown: data must be a ChatDataModule or VLMDataModule, "
            "or a HybridFeatureDataModule with one of them"
        )
    console = console or Console(highlight=False)
    hparams = {} if datamodule.trainer is None else datamodule.trainer.lightning_module.hparams
    limit, datamodule.max_bad_rows = datamodule.max_bad_rows, sys.maxsize
    with _quiet():
        datamodule.prepare_data()
        if datamodule.stream_rows is not None:
            datamodule.read_first_block(datamodule.stream_rows)
    sides = sorted(datamodule.row_sets.items())  # train first
    for side, rows in sides:
        part = ", the first block" if side == "train" and datamodule.stream_rows is not None else ""
        _print_title(console, f"{side} rows: {rows.name}{part}")
        _print_counts(console, rows, datamodule.max_length, limit)
        _print_statistics(console, RowStatistics.of(rows), hparams.get("num_anchors"))
    chosen = [(side, rows, index) for side, rows in sides for index in _chosen(rows, shown)]
    if shown.row is not None and not chosen:
        raise ValueError(f"--row {shown.row} is not among the rows kept: what was dropped, and why, stands above")
    for side, rows, index in chosen:
        _print_row(console, datamodule, side, rows, index)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what a datamodule says when it loads rows: all of it is in the report."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)


def _print_title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(f"── {title}", style="bold"), soft_wrap=True)


def _print_counts(console: Console, rows: RowSet, max_length: int, limit: int) -> None:
    cut = int(rows.column("cut").sum())
    console.print(f"{len(rows.table)} rows read, {len(rows)} kept, {cut} of them cut to {max_length} tokens")
    if rows.dropped:
        console.print("dropped:")
    for loss, is_bad in rows.losses():
        console.print(Text(f"  {loss}", style="yellow" if is_bad else ""), soft_wrap=True)
    bad = int((rows.table.data.column("error").to_numpy() != "").sum())
    if bad > limit:
        console.print(f"bad rows: {bad}, so that fit stops: max_bad_rows is {limit}", style="bold red")


def _print_statistics(console: Console, numbers: RowStatistics, num_anchors: int | None) -> None:
    table = Table("", "all", *_QUANTILES, box=None, padding=(0, 1), title="in a row", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    tokens, supervised = numbers.tokens, numbers.supervised
    _add_numbers(table, "tokens", tokens.sum(), tokens, ".0f")
    _add_numbers(table, "supervised", supervised.sum(), supervised, ".0f")
    share = 100 * supervised.sum() / max(1, tokens.sum())
    _add_numbers(table, "supervised, %", share, 100 * supervised / tokens.clip(min=1), ".1f")
    _add_numbers(table, "anchors", numbers.anchors.sum(), numbers.anchors, ".0f")
    if (numbers.weights != 1).any():
        _add_numbers(table, "weight", numbers.weights.sum(), numbers.weights, ".4g")
    console.print(table)
    if num_anchors is not None:
        enough = int((numbers.anchors >= num_anchors).sum())
        console.print(f"{enough} of {len(tokens)} rows have places for num_anchors {num_anchors} blocks")
    console.print("rows by number of tokens:")
    console.print(_bars(histogram(tokens, _BINS), min(_LONGEST_BAR, console.width // 2), console.options.ascii_only))


def _add_numbers(table: Table, name: str, total: Any, values: npt.NDArray[Any], form: str) -> None:
    """The total, and quantiles that are values of rows, none in between."""
    quantiles = np.quantile(values, list(_QUANTILES.values()), method="inverted_cdf")
    table.add_row(name, *(f"{value:{form}}" for value in (total, *quantiles)))


def _bars(counts: list[tuple[int, int, int]], longest: int, ascii_only: bool) -> Table:
    most = max(count for *_, count in counts)
    table = Table.grid(padding=(0, 1))
    for first, last, count in counts:
        bar = ("#" if ascii_only else "█") * -(-count * longest // most)
        table.add_row(Text(f"  {first}-{last}", justify="right"), Text(str(count), justify="right"), bar)
    return table


def _chosen(rows: RowSet, shown: Shown) -> list[int]:
    """Indices of the rows shown."""
    if shown.row is not None:
        return [int(i) for i in np.flatnonzero(rows.column("row_id") == shown.row - 1)]
    count = min(shown.count, len(rows))
    if shown.seed is None:
        return list(range(count))
    return sorted(int(i) for i in np.random.default_rng(shown.seed).choice(len(rows), count, replace=False))


def _print_row(console: Console, datamodule: ChatDataModule, side: str, rows: RowSet, index: int) -> None:
    row = rows.encoded(index)
    ids, mask = row["input_ids"], row["loss_mask"]
    weight = float(rows.column("weight")[index])
    weighs = f", weight {weight:g}" if weight != 1 else ""
    name = f"{side} row {rows.place(int(row['row_id']))}"
    _print_title(console, f"{name}: {len(ids)} tokens, {int(mask.sum())} supervised{weighs}")
    coloured = console.color_system is not None and not console.no_color
    # Wrapping is left to the terminal, so that what is copied or piped is the text as it is.
    console.print(_row_text(pieces(datamodule.renderer.tokenizer, ids, mask), marks=not coloured), soft_wrap=True)


def _row_text(parts: Iterator[Piece], marks: bool) -> Text:
    """The row with its supervised tokens in colour, or between marks."""
    text = Text()
    for supervised, stretch in groupby(parts, key=lambda piece: piece.supervised):
        text.append("⟦" if marks and supervised else "")
        for piece, same in groupby(stretch):
            count = len(list(same))
            shown = _visible(piece.text)
            repeated = (
                f"{shown} (x {count})" if piece.special and count > 1 else shown * count
            )  # pictures have hundreds
            text.append(repeated, style=_STYLES[piece.supervised, piece.special])
        text.append("⟧" if marks and supervised else "")
    return text


def _visible(text: str) -> str:
    """Control characters as escapes, so that data cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)

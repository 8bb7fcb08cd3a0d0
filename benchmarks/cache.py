"""Time of filling a feature cache against capturing alone, and of a training step from the cache against one online.

python -m benchmarks.cache --target DIR
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from benchmarks import report
from benchmarks.measure import alternate, ratio
from dspark_lightning import DSparkModule, compute_dspark_loss
from dspark_lightning.capture import capture
from dspark_lightning.datamodules import CachedFeatureDataModule, ChatDataModule, HybridFeatureDataModule
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.writer import FeatureWriter
from dspark_lightning.loading import load_target
from dspark_lightning.machine import describe_machine

BATCH, TOKENS = 2, 256
"""Rows of a batch, and tokens of each: all supervised but the first."""

ROWS = 16
"""Of the cache."""

HEADER = ("", "with it ms", "without ms", "ratio")


def main() -> None:
    """Measure one target and print the table."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    with TemporaryDirectory() as folder:
        seconds = measure(Path(folder), args)
    machine = describe_machine(torch.device("cpu"))
    table = []
    for name, ours, theirs in (
        ("capture and store, against capture", "store", "capture"),
        ("step from the cache, against online", "cached", "online"),
    ):
        times = [report.milliseconds(median(seconds[one])) for one in (ours, theirs)]
        table.append([name, *times, report.spread(ratio(seconds[ours], seconds[theirs]))])
    report.print_table(machine, HEADER, table)
    if args.json:
        report.write_json(args.json, machine, [{"target": args.gguf_file or args.target, "seconds": seconds}])


def measure(folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Fill a cache, then time everything in turn: seconds by name."""
    vocabulary = load_target(args.target, args.gguf_file).config.get_text_config().vocab_size
    mask_token_id = vocabulary - 1
    data = _write_rows(folder / "rows.jsonl", mask_token_id)
    module = DSparkModule(
        args.target, mask_token_id, args.gguf_file, num_draft_layers=2, num_anchors=32, markov_rank=256
    )
    source = ChatDataModule(
        data,
        tokenizer=args.target,
        gguf_file=args.gguf_file,
        mask_token_id=mask_token_id,
        max_length=TOKENS,
        batch_size=BATCH,
    )
    hybrid = HybridFeatureDataModule(source, str(folder / "cache"))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.predict(module, datamodule=hybrid, return_predictions=False)
    cached = CachedFeatureDataModule(str(folder / "cache"), batch_size=BATCH)
    source.trainer = None
    for datamodule in (cached, source):
        datamodule.setup("fit")
    batches = list(source.train_dataloader())
    _check_equal(module, next(iter(source.train_dataloader())), next(iter(cached.train_dataloader())))
    shutil.copytree(folder / "cache", folder / "empty", ignore=shutil.ignore_patterns("features"))
    return alternate(
        {
            "capture": lambda: [capture(module.target, batch) for batch in batches],
            "store": lambda: _store(module, batches, folder / "empty"),
            "online": _steps(module, source.train_dataloader),
            "cached": _steps(module, cached.train_dataloader),
        },
        args.repeats,
    )


def _write_rows(path: Path, vocabulary: int) -> str:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=generator).tolist()
    rows = [{"input_ids": row, "loss_mask": [0] + [1] * (TOKENS - 1)} for row in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _check_equal(module: DSparkModule, online: dict[str, Tensor], cached: dict[str, Tensor]) -> None:
    """Both must train on the same rows, to the same loss."""
    losses = [_loss(module, batch).item() for batch in (online, cached)]
    if online["row_id"].tolist() != cached["row_id"].tolist() or not math.isclose(*losses, abs_tol=1e-3):
        raise ValueError(f"the loss from the cache differs by {losses[1] - losses[0]:.1e} from {losses[0]:.4f} online")


def _loss(module: DSparkModule, batch: dict[str, Tensor]) -> Tensor:
    return compute_dspark_loss(module(batch, output="hidden"), 4.0, 0.1, 0.9, 1.0)


def _store(module: DSparkModule, batches: list[dict[str, Tensor]], folder: Path) -> None:
    """Capture all rows and have them written."""
    shutil.rmtree(folder / "features", ignore_errors=True)
    writer = FeatureWriter(FeatureCache(folder))
    for batch in batches:
        writer.add("train", batch, capture(module.target, batch))
    writer.flush()


def _steps(module: DSparkModule, loader: Callable[[], Any]) -> Callable[[], None]:
    """A training step on the next batch: loading, features, draft, loss, backward."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in cycle([None]):
            yield from loader()

    source = batches()

    def step() -> None:
        _loss(module, next(source)).backward()
        module.zero_grad()

    return step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--target", default="embedded", help="model folder, hub id or embedded")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--json", help="file to write the numbers to")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Throughput of training steps on packed rows, against the same documents one a row.

python -m benchmarks.packing --target DIR --gguf-file FILE --mask-token-id 3 --data rows.jsonl
"""

import argparse
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.measure import Run, Spread, alternate, ratio
from dspark_lightning import DSparkModule
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.machine import describe_machine

HEADER = ("rows", "batches", "filled", "anchors a row", "anchors", "slots", "s", "tokens/s", "slots/s", "per unpacked")
LOSS: dict[str, Any] = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
}

Batch = dict[str, Tensor]


def main() -> None:
    """Measure both ways of feeding the documents, print the table and write the numbers."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    module = DSparkModule(
        args.target, args.mask_token_id, args.gguf_file, num_draft_layers=args.draft_layers, num_anchors=args.anchors
    )
    module.configure_model()
    plain, packed = (load_batches(args, packing) for packing in (False, True))
    rows = [sum(len(batch["row_id"]) for batch in batches) for batches in (plain, packed)]
    anchors = {"unpacked": args.anchors, "packed": round(args.anchors * rows[0] / rows[1])}
    sides = {"unpacked": plain, "packed": packed}
    work: dict[str, dict[str, float]] = {}  # the same in every run

    def run(name: str) -> None:
        work[name] = step_over(module, sides[name], anchors[name])

    runs: dict[str, Run] = {name: partial(run, name) for name in sides}
    seconds = alternate(runs, args.repeats)
    results = [
        {"rows": name, "anchors": anchors[name], "batches": len(sides[name]), "seconds": seconds[name], **work[name]}
        for name in sides
    ]
    machine = describe_machine(torch.device("cpu"))
    report.print_table(machine, HEADER, [_row(result, results[0]) for result in results])
    if args.json:
        report.write_json(args.json, machine, results)


def load_batches(args: argparse.Namespace, packing: bool) -> list[Batch]:
    """The same documents in batches of `args.batch` rows, or of packs with about as many tokens."""
    datamodule = ChatDataModule(
        args.data,
        train_split=f"train[:{args.rows}]",
        tokenizer=args.target,
        gguf_file=args.gguf_file,
        mask_token_id=args.mask_token_id,
        max_length=args.max_length,
        min_supervised_tokens=14,  # as with blocks of 7
        packing=packing,
    )
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    rows = [cast(Any, loader).dataset[i] for i in range(len(loader))]
    # A pack holds so many documents on average; a batch of packs then about as many as a batch of rows.
    documents = sum(len(row["seq_lens"]) for row in rows) / len(rows) if packing else 1
    size = max(1, round(args.batch / documents))
    return [cast(Any, loader).collate_fn(rows[i : i + size]) for i in range(0, len(rows), size)]


def step_over(module: DSparkModule, batches: list[Batch], num_anchors: int) -> dict[str, float]:
    """Forward and backward for each batch, target included.

    Returns:
        real tokens, places, anchors and supervised slots of all batches.
    """
    draft = cast(DSparkDraft, module.draft)
    draft.num_anchors = num_anchors
    work = dict.fromkeys(("tokens", "places", "kept_anchors", "supervised_tokens"), 0.0)
    for batch in batches:
        draft.zero_grad()
        outputs = module(batch, output="hidden")
        loss, terms = compute_dspark_loss(outputs=outputs, **LOSS, return_terms=True)
        loss.backward()
        work["tokens"] += batch["attention_mask"].sum().item()
        work["places"] += batch["attention_mask"].numel()
        for name in ("kept_anchors", "supervised_tokens"):
            work[name] += terms[name].item()
    return work


def _row(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    seconds = median(result["seconds"])
    more = result["supervised_tokens"] / reference["supervised_tokens"]
    times = ratio(reference["seconds"], result["seconds"])
    return [
        result["rows"],
        str(result["batches"]),
        f"{result['tokens'] / result['places']:.1%}",
        str(result["anchors"]),
        f"{result['kept_anchors']:.0f}",
        f"{result['supervised_tokens']:.0f}",
        f"{seconds:.2f}",
        f"{result['tokens'] / seconds:.0f}",
        f"{result['supervised_tokens'] / seconds:.0f}",
        report.spread(Spread(*(more * one for one in times))),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--target", default="embedded", help="model folder, hub id or embedded")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--mask-token-id", type=int, default=5, help="of the draft")
    parser.add_argument("--data", default="embedded", help="chat rows")
    parser.add_argument("--rows", type=int, default=64, help="documents, the first of the data")
    parser.add_argument("--batch", type=int, default=8, help="rows of an unpacked batch")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--anchors", type=int, default=32, help="of an unpacked row; packs get as many a document")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--json", help="file to write the numbers to")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Time of one round of speculative decoding, against one plain decoding step and the bytes that must be read.

python -m benchmarks.decode --target DIR --gguf-file FILE
"""

import argparse
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from benchmarks import report
from benchmarks.measure import Run, alternate, ratio
from benchmarks.rounds import READ_BYTES, LeanStep, PlainStep, RoundParts, WholeRound, plain_bytes, read, round_bytes
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.loading import load_target
from dspark_lightning.machine import describe_machine
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.target import HFDSparkTargetModel, build_target_layer_ids

HEADS: dict[str, dict[str, Any]] = {
    "none": {"markov_rank": 0},
    **{kind: {"markov_rank": 256, "markov_head_type": kind} for kind in ("vanilla", "gated", "rnn")},
}
"""Markov heads of fresh drafts, by name."""

DRAFT_LAYERS, BLOCK_SIZE, FEATURES = 2, 7, 5
"""Of fresh drafts; small targets have fewer feature layers."""

PARTS = ("draft layers", "draft head", "Markov steps", "target layers", "target head")
HEADER = ("context", "Markov head", "round ms", "plain ms", "round/plain", "lean ms", "floor ms", "round/floor")


def main() -> None:
    """Measure every context and head asked for, print both tables and write the numbers."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = load_target(args.target, args.gguf_file, dtype)
    drafts = {args.draft: load_pretrained_draft(args.draft)} if args.draft else _fresh_drafts(model, args.heads)
    results = []
    for name, draft in drafts.items():
        cast(nn.Module, draft).to(dtype).eval()
        target = HFDSparkTargetModel(model, draft.target_layer_ids)
        if not args.draft:
            draft.initialize_embeddings_and_head(target.embed_tokens, target.lm_head)
        results += [{"head": name, **measure(target, draft, context, args.repeats)} for context in args.contexts]
    machine = {**describe_machine(torch.device("cpu")), "dtype": args.dtype}
    report.print_table(machine, HEADER, [_row(result) for result in results])
    parts = [_parts_row(result) for result in results]
    report.print_table({"parts of a round in": "ms"}, (*HEADER[:2], *PARTS, "the rest"), parts)
    if args.json:
        report.write_json(args.json, machine, results)


def _fresh_drafts(model: Any, heads: list[str]) -> dict[str, DSparkDraft]:
    text = model.config.get_text_config()
    layer_ids = build_target_layer_ids(text.num_hidden_layers, min(FEATURES, text.num_hidden_layers - 1))
    shape = {"num_draft_layers": DRAFT_LAYERS, "block_size": BLOCK_SIZE, "target_layer_ids": layer_ids}
    torch.manual_seed(0)
    return {
        head: build_draft_model(model.config, mask_token_id=text.vocab_size - 1, **shape, **HEADS[head])
        for head in heads
    }


def measure(target: HFDSparkTargetModel, draft: DSparkDraft, context: int, repeats: int) -> dict[str, Any]:
    """Time a round, its parts, plain steps and a read of memory in turn, all behind the same random prompt.

    Returns:
        seconds by name, one for each repeat, and the bytes that a round and a plain step have to read.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.model.config.get_text_config().vocab_size, (context,), generator=generator)
    runs: dict[str, Run] = {
        "round": WholeRound(target, draft, prompt),
        "plain": PlainStep(target.model, prompt),
        "lean": LeanStep(target.model, prompt),
        "read": read(),
        **RoundParts(target, draft, prompt).runs,
    }
    seconds = alternate(runs, repeats)
    needed = {"round": round_bytes(target, draft, context), "plain": plain_bytes(target, context)}
    return {"context": context, "seconds": seconds, "bytes": needed, "read_bytes": READ_BYTES}


def _row(result: dict[str, Any]) -> list[str]:
    seconds = result["seconds"]
    floor = [result["bytes"]["round"] / READ_BYTES * s for s in seconds["read"]]
    return [
        str(result["context"]),
        result["head"],
        report.milliseconds(median(seconds["round"])),
        report.milliseconds(median(seconds["plain"])),
        report.spread(ratio(seconds["round"], seconds["plain"])),
        report.milliseconds(median(seconds["lean"])),
        report.milliseconds(median(floor)),
        report.spread(ratio(seconds["round"], floor)),
    ]


def _parts_row(result: dict[str, Any]) -> list[str]:
    seconds = result["seconds"]
    parts = [median(seconds[part]) for part in PARTS]
    rest = median(seconds["round"]) - sum(parts)
    return [str(result["context"]), result["head"], *(report.milliseconds(s) for s in (*parts, rest))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--target", default="embedded", help="model folder, hub id or embedded")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--draft", help="folder of an exported draft, instead of fresh ones")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["none", "vanilla", "rnn"], help="of fresh drafts")
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 256, 1024], help="tokens before the round")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", help="file to write the numbers to")
    return parser.parse_args()


if __name__ == "__main__":
    main()

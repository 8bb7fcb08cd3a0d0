"""How much memory a rank needs for a target and its draft, before anything is downloaded.

    python scripts/memory_per_rank.py --config configs/qwen3_4b.yaml --config configs/strategy/fsdp2.yaml --ranks 8
    python scripts/memory_per_rank.py --target FOLDER --ranks 2 --precision 32-true
    python scripts/memory_per_rank.py --table     # the table of docs/many_ranks.md

Both models are built empty from the target's config, so its weights are not needed. What is held is exact, up to the
padding of shards; what a step adds is an estimate, and activations are in neither.
Shapes: H hidden size, F feature layers, V vocabulary.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from io import StringIO
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import PreTrainedModel

from dspark_lightning import DSparkDraft, build_draft_model
from dspark_lightning.chunked_loss import CHUNK_ROWS, TILE_BYTES
from dspark_lightning.drafts.config import DraftArgs
from dspark_lightning.loading import load_empty_target
from dspark_lightning.sharding import draft_units, target_units
from target_shapes import SHAPES, Shape

GIB = 2**30
PRECISIONS = {  # of the target, of the draft's trainable weights, of matrix products
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}
STRATEGIES = ("ddp", "fsdp", "fsdp2")


@dataclass(frozen=True)
class Setting:
    """How a pair is trained."""

    ranks: int
    strategy: str = "fsdp2"
    precision: str = "bf16-mixed"
    replicate_target: bool = False

    @property
    def shards_target(self) -> bool:
        """Whether ranks hold parts of the target."""
        return self.strategy != "ddp" and not self.replicate_target


@dataclass(frozen=True)
class Pair:
    """A target and its draft on the meta device, in the dtypes of a precision."""

    target: PreTrainedModel
    draft: DSparkDraft


def build_pair(target: str, precision: str, draft_args: dict[str, Any], trust_remote_code: bool = False) -> Pair:
    """Build both models without weights.

    Args:
        target: folder, hub id or "embedded"; only its config is read.
        precision: a key of `PRECISIONS`.
        draft_args: fields of `DraftArgs`.
        trust_remote_code: whether code that comes with the target may run.
    """
    target_dtype, draft_dtype, _ = PRECISIONS[precision]
    model = load_empty_target(target, dtype=target_dtype, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        draft = build_draft_model(model.config, **draft_args)
    for parameter in draft.parameters():  # embedding and head, which are frozen, are the target's; buffers stay fp32
        parameter.data = parameter.to(draft_dtype if parameter.requires_grad else target_dtype)
    return Pair(model, draft)


# What is held ---------------------------------------------------------------------------------------------------------


def whole_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that every rank has whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shard_bytes(unit: Sequence[Tensor], setting: Setting) -> int:
    """Bytes that a rank holds of a unit's weights.

    FSDP2 cuts each weight along its first dimension into equal parts, the last padded. FSDP1 puts a unit's weights
    behind each other, each at a multiple of 16 bytes, and cuts that; weights of another dtype than most stay whole.
    """
    ranks = setting.ranks
    if not unit:
        return 0
    if setting.strategy == "fsdp2":
        return sum(ceil(x.shape[0] / ranks) * (x.numel() // x.shape[0]) * x.element_size() for x in unit)
    sizes: Counter[torch.dtype] = Counter()
    for weight in unit:
        sizes[weight.dtype] += weight.numel()
    most = sizes.most_common(1)[0][0]
    end = 0
    for weight in (x for x in unit if x.dtype == most):
        end = ceil(end / 16) * 16 + weight.numel() * weight.element_size()
    per_rank = ceil(end / most.itemsize / ranks) * most.itemsize
    return per_rank + whole_bytes(x for x in unit if x.dtype != most)


def split_units(root: nn.Module, modules: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each module that no earlier one has, then the rest, which belong to the root."""
    taken: set[int] = set()
    units = []
    for module in (*modules, root):
        units.append([p for p in module.parameters() if id(p) not in taken])
        taken |= {id(p) for p in units[-1]}
    return units


def split_target(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Parameters of the units into which a target is split, the root last; only the draft has the head."""
    return split_units(model.base_model, target_units(model))


def split_draft(draft: DSparkDraft) -> list[list[nn.Parameter]]:
    """Parameters of the units into which a draft is split, the root last."""
    return split_units(draft, draft_units(draft))


def held_bytes(pair: Pair, setting: Setting) -> dict[str, int]:
    """Bytes that a rank holds between two steps.

    Args:
        pair: built for the setting's precision.
        setting: how it is trained.
    """
    target, draft = pair.target, pair.draft
    if setting.shards_target:
        weights = sum(shard_bytes(unit, setting) for unit in split_target(target))
        buffers = whole_bytes(target.base_model.buffers())
    else:
        weights, buffers = whole_bytes(target.parameters()), whole_bytes(target.buffers())
    if setting.strategy == "ddp":
        trainable, frozen = whole_bytes(p for p in draft.parameters() if p.requires_grad), 0  # frozen: the target's
    else:
        units = split_draft(draft)
        trainable = sum(shard_bytes(unit, setting) for unit in units if unit[0].requires_grad)
        frozen = sum(shard_bytes(unit, setting) for unit in units if not unit[0].requires_grad)
    return {
        "target: weights": weights,
        "target: buffers": buffers,
        "draft: trained weights": trainable,
        "draft: gradients": trainable,
        "draft: AdamW's two states": 2 * trainable,
        "draft: frozen embedding and head": frozen,
        "draft: buffers": whole_bytes(draft.buffers()),
    }


# What a step adds -----------------------------------------------------------------------------------------------------


def gathered_bytes(pair: Pair, setting: Setting) -> dict[str, int]:
    """Bytes of what is whole for a while: the largest unit, beside the root, which stays whole through a step."""
    gathered = {
        "target: root and largest unit": 0,
        "draft: root and largest unit": 0,
        "draft: gradients of the same": 0,
    }
    if setting.shards_target:
        *units, root = split_target(pair.target)
        gathered["target: root and largest unit"] = whole_bytes(root) + max(whole_bytes(unit) for unit in units)
    if setting.strategy != "ddp":
        *units, root = split_draft(pair.draft)
        gathered["draft: root and largest unit"] = whole_bytes(root) + max(whole_bytes(unit) for unit in units)
        trained = [whole_bytes(unit) for unit in units if unit[0].requires_grad]
        gathered["draft: gradients of the same"] = whole_bytes(root) + max(trained)
    return gathered


def step_bytes(pair: Pair, setting: Setting, tokens: int) -> dict[str, int]:
    """Bytes of a step's larger arrays, as far as they follow from shapes; the chunked loss as on a GPU.

    Args:
        pair: built for the setting's precision.
        setting: how it is trained.
        tokens: of a micro-batch on one rank, padding included.
    """
    target_dtype, _, product = PRECISIONS[setting.precision]
    config = pair.draft.config
    hidden, vocabulary, features = config.hidden_size, config.vocab_size, len(pair.draft.target_layer_ids)
    chunk = CHUNK_ROWS["other"] * vocabulary * product.itemsize
    return {
        f"features [{tokens}, {features * hidden}]": tokens * features * hidden * target_dtype.itemsize,
        f"last hidden state [{tokens}, {hidden}]": tokens * hidden * target_dtype.itemsize,
        f"logits of a chunk of the loss [{CHUNK_ROWS['other']}, {vocabulary}]": chunk,
        "tiles of the loss, fp32": 3 * TILE_BYTES["other"],
    }


# Printing -------------------------------------------------------------------------------------------------------------


def describe(pair: Pair, setting: Setting, tokens: int) -> str:
    """One table, in GiB, or in MiB where nothing reaches one GiB."""
    trained = sum(p.numel() for p in pair.draft.parameters() if p.requires_grad)
    total = sum(p.numel() for p in pair.target.parameters())
    where = "split" if setting.shards_target else "whole"
    parts = [held_bytes(pair, setting), gathered_bytes(pair, setting), step_bytes(pair, setting, tokens)]
    total_bytes = sum(sum(part.values()) for part in parts)
    name_of_unit, unit = ("GiB", GIB) if total_bytes > GIB else ("MiB", GIB / 1024)
    lines = [
        f"{type(pair.target).__name__}, {total / 1e9:.3f} B parameters, {where}; "
        f"{type(pair.draft).__name__}, {trained / 1e9:.3f} B trained",
        f"{setting.strategy}, {setting.precision}, {setting.ranks} ranks; {name_of_unit} on each rank",
    ]
    titles = ("held", "gathered while it runs (estimate)", "arrays of a step, without activations (estimate)")
    for title, part in zip(titles, parts, strict=True):
        lines += ["", title, *(f"  {name:<52}{size / unit:>10.3f}" for name, size in part.items() if size)]
        lines.append(f"  {'sum':<52}{sum(part.values()) / unit:>10.3f}")
    return "\n".join([*lines, "", f"{'all three':<54}{total_bytes / unit:>10.3f}"])


def shape_row(shape: Shape, ranks: Sequence[int]) -> str:
    """One row of the table of sizes, bf16-mixed; under a number of ranks: what FSDP2 holds, and the gathered units."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        shape.config().save_pretrained(folder)
        pair = build_pair(folder, "bf16-mixed", {"mask_token_id": 0, **shape.draft_args})
    trained = sum(p.numel() for p in pair.draft.parameters() if p.requires_grad)
    total = sum(p.numel() for p in pair.target.parameters())
    cells = [shape.name, f"{total / 1e9:.1f} B", f"{trained / 1e9:.2f} B"]
    whole = Setting(1, "ddp")
    cells.append(f"{sum(held_bytes(pair, whole).values()) / GIB:.0f}")
    for count in ranks:
        setting = Setting(count)
        held, gathered = (sum(f(pair, setting).values()) for f in (held_bytes, gathered_bytes))
        cells.append(f"{held / GIB:.1f} + {gathered / GIB:.1f}")
    one = replace(whole, ranks=ranks[0], strategy="fsdp2", replicate_target=True)
    held, gathered = (sum(f(pair, one).values()) for f in (held_bytes, gathered_bytes))
    cells += [f"{held / GIB:.0f} + {gathered / GIB:.1f}"]
    cells += [f"{sum(step_bytes(pair, whole, shape.tokens).values()) / GIB:.1f}"]
    return "| " + " | ".join(cells) + " |"


def table(ranks: Sequence[int] = (8, 16, 64)) -> str:
    """The table of docs/many_ranks.md, in Markdown."""
    heads = ["target", "its size", "trained", "DDP, or one rank", *(f"FSDP2, {count}" for count in ranks)]
    heads += [f"draft split over {ranks[0]} only", "step"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(shape_row(shape, ranks) for shape in SHAPES)])


def merged(paths: Iterable[Path]) -> dict[str, Any]:
    """The settings of several configurations, the later ones over the earlier, as `dspark fit` takes them."""
    settings: dict[str, Any] = {}
    for path in paths:
        settings = _over(settings, yaml.safe_load(path.read_text()))
    return settings


def _over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def strategy_of(trainer: dict[str, Any]) -> str:
    """Which of `STRATEGIES` a configuration's trainer has; without a word on it Lightning takes DDP."""
    given = trainer.get("strategy", "ddp")
    name = given if isinstance(given, str) else given["class_path"].rpartition(".")[2]
    if "FSDP2" in name or "ModelParallel" in name:
        return "fsdp2"
    return "fsdp" if "fsdp" in name.lower() else "ddp"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Memory of a rank that trains a draft, without any weights.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, action="append", help="training configuration, then its overlays")
    source.add_argument("--table", action="store_true", help="print the table of docs/many_ranks.md")
    source.add_argument("--target", help="folder with a config.json, hub id or 'embedded'; the draft's defaults")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", choices=STRATEGIES, help="default: the configuration's, or fsdp2")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="default: the configuration's, or bf16-mixed")
    parser.add_argument("--replicate_target", action="store_true", help="as model.init_args.shard_target: false")
    given = parser.parse_args()
    if given.ranks < 1:
        parser.error(f"--ranks must be 1 or more, got {given.ranks}")
    return given


def describe_run(given: argparse.Namespace) -> str:
    """The table of the configuration or target on the command line."""
    settings = merged(given.config or ())
    trainer = settings.get("trainer", {})
    model = settings.get("model", {}).get("init_args", {"target": given.target, "mask_token_id": 0})
    data = settings.get("data", {}).get("init_args", {})
    setting = Setting(
        given.ranks,
        given.strategy or (strategy_of(trainer) if settings else "fsdp2"),
        given.precision or (trainer.get("precision", "32-true") if settings else "bf16-mixed"),
        given.replicate_target or not model.get("shard_target", True),
    )
    names = {field.name for field in fields(DraftArgs)}
    draft_args = {name: value for name, value in model.items() if name in names}
    pair = build_pair(model["target"], setting.precision, draft_args, model.get("trust_remote_code", False))
    return describe(pair, setting, data.get("max_length", 4096) * data.get("batch_size", 1))


def main() -> None:
    """Read the command line and print; what cannot be read ends with one line."""
    given = arguments()
    try:
        print(table() if given.table else describe_run(given))
    except (ValueError, OSError) as error:
        sys.exit(f"memory_per_rank: error: {error}")


if __name__ == "__main__":
    main()

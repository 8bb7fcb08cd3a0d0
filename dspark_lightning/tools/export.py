"""`dspark export`: the draft of a training checkpoint, as a folder to serve."""

import shlex
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dspark_lightning.checkpoint_draft import load_checkpoint_draft, read_checkpoint
from dspark_lightning.evaluation.pair import check_sizes
from dspark_lightning.export import check_export_path, export_draft
from dspark_lightning.identity import check_identity
from dspark_lightning.layouts.written import ExportLayout
from dspark_lightning.serving.decode_check import keep_decoded
from dspark_lightning.serving.engines import serve_command
from dspark_lightning.serving.run_record import checkpoint_record
from dspark_lightning.target import HFDSparkTargetModel
from dspark_lightning.tools.target import Dtype, launch_processes, load_placed_target


def export(
    ckpt_path: Path,
    output: Path,
    format: ExportLayout = "dspark",
    target: str | None = None,
    gguf_file: str | None = None,
    accelerator: str = "auto",
    dtype: Dtype | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the draft of a training checkpoint as a folder that serving engines or other trainers load.

    The folder is checked before it takes its place. With a target, it also decodes the prompts that the checkpoint
    keeps, and `dspark check` compares what it gets with what came out here. The other options are that target's.

    Args:
        ckpt_path: checkpoint of a `DSparkModule`, a file or a sharded folder.
        output: folder to write; its name must contain "dspark" and not "dflash".
        format: dspark for serving engines, deepspec for DeepSpec and NeMo Automodel, or speculators (drafts with a
            Qwen3 backbone; the target's config is read).
        target: model folder, hub id, or "embedded" to decode with; without one nothing is decoded.
        gguf_file: name of a GGUF file in the target's folder; default: the run's, where that is the target.
        accelerator: auto, cpu, cuda or another that Lightning knows.
        dtype: of target and draft; default: float32 on the CPU, bfloat16 elsewhere.
        device_map: "auto" spreads the target over all devices.
        trust_remote_code: whether code that comes with the target may run.
    """
    check_export_path(output)
    draft, trained_for = load_checkpoint_draft(ckpt_path)
    if format != "dspark":
        if target is not None:
            raise ValueError(f"format {format!r} keeps nothing of decoding: leave out target")
        path = export_draft(draft, output, layout=format, target=trained_for)
        print(f"Draft exported to {path}")
        print(f"Next: train on from it with --model.init_args.draft_init {shlex.quote(str(path))}")
        return
    record = checkpoint_record(ckpt_path)
    if target is not None and not record.prompts:
        raise ValueError(
            f"the checkpoint {str(ckpt_path)!r} keeps no prompts to decode, since its run had no DraftExport and "
            "validation before it: leave out target"
        )
    model = None
    if target is not None:  # read before anything is written
        if target == trained_for:
            gguf_file = gguf_file or record.gguf_file
        fabric = launch_processes(accelerator, 1, device_map)
        model = load_placed_target(fabric, target, gguf_file, dtype, device_map, None, trust_remote_code)
        check_sizes(model.config, draft.config)
        _check_trained_for(model, target, ckpt_path)
    path = export_draft(draft, output, record=record)
    print(f"Draft exported to {path}")
    if model is not None:
        decoded = keep_decoded(model, path, record).decoded
        print("Nothing was drafted" if decoded is None else f"Decoding: {decoded.tau:.2f} tokens per target pass")
    print(f"Next: {serve_command(path, trained_for, draft.block_size)}")


def _check_trained_for(model: PreTrainedModel, target: str, ckpt_path: Path) -> None:
    """Refuse to decode with another target than the draft's; float16 rounds too much to tell."""
    saved = read_checkpoint(ckpt_path)["dspark"]
    if model.dtype != torch.float16:
        weights = HFDSparkTargetModel(model, [0]).fingerprint()
        check_identity(saved | {"target": target, "target_fingerprint": weights}, saved)

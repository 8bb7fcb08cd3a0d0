"""`dspark evaluate`: what a draft is worth when it really decodes."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from dspark_lightning.datamodules.loss_mask import ChatRenderer, read_template
from dspark_lightning.datamodules.prompts import Conversation, load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.decoding.records import AnswerRecord, records_digest, write_records
from dspark_lightning.evaluation.evaluate import evaluation_results, play_all, scalars
from dspark_lightning.evaluation.figures import evaluation_figure
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.evaluation.tables import print_evaluation
from dspark_lightning.export import load_pretrained_draft
from dspark_lightning.loading import load_target
from dspark_lightning.replace import check_folder, write_finished, write_text
from dspark_lightning.tools.command import command_line
from dspark_lightning.tools.machine import describe_machine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(
    draft: Path,
    target: str,
    data: str | list[str],
    gguf_file: str | None = None,
    output: Path | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    confidence_threshold: float = 0.0,
    limit: int | None = None,
    compare: bool = True,
    seed: int = 0,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    accelerator: str = "auto",
    devices: int = 1,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    device_map: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Decode conversations with a draft and its target: acceptance, speed, and whether confidences can be believed.

    Writes records.jsonl (every round), evaluation.json, evaluation.png and TensorBoard events.

    Args:
        draft: folder of an exported draft.
        target: model folder, hub id, or "embedded".
        data: JSONL, JSON or parquet file, hub id or "embedded": rows with turns, prompt, messages or conversations, of
            which the user's turns are played; several as '[a.jsonl, b.jsonl]', or with further --data+.
        gguf_file: name of a GGUF file in the target's folder.
        output: folder to write; default: "evaluation" beside the draft.
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        confidence_threshold: a block is cut before the first token whose predicted acceptance is lower; 0 never cuts.
        limit: so many first conversations of each dataset; default: all.
        compare: whether the target also answers alone, for the speed-up.
        seed: of the random numbers; what they are does not depend on the number of processes.
        chat_template: Jinja file in place of the tokenizer's template.
        chat_template_kwargs: options of the template, such as enable_thinking.
        accelerator: auto, cpu, cuda or another that Lightning knows.
        devices: processes, each with a whole target.
        dtype: of target and draft; default: float32 on the CPU, bfloat16 elsewhere.
        device_map: "auto" spreads a target over the devices of one process.
        attn_implementation: how the target attends; default: as transformers chooses.
        trust_remote_code: whether code that comes with the target may run.
    """
    settings = DecodeSettings(max_new_tokens, temperature, confidence_threshold, seed, compare)
    conversations = load_conversations(data, limit)
    loaded, folder = load_pretrained_draft(draft), output or draft.parent / "evaluation"
    check_folder(folder)
    if devices < 1:
        raise ValueError(f"devices must be 1 or more, got {devices}")
    if device_map is not None and devices > 1:
        raise ValueError(f"device_map {device_map!r} claims all devices for one process: leave out devices {devices}")
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    weights = _DTYPES[dtype or ("float32" if fabric.device.type == "cpu" else "bfloat16")]
    model = load_target(target, gguf_file, weights, trust_remote_code, attn_implementation, device_map)
    if device_map is None:
        cast(nn.Module, model).to(fabric.device)
    pair = pair_up(model, loaded)
    renderer = ChatRenderer(
        load_tokenizer(target, gguf_file, trust_remote_code),
        chat_template=None if chat_template is None else read_template(chat_template),
        template_name=chat_template,
        template_kwargs=chat_template_kwargs,
    )
    player = Player(pair, loaded, renderer, settings)
    if compare:
        player.warm_up(conversations[0])
    records = play_all(player, conversations, _shown if fabric.is_global_zero else iter)
    if fabric.is_global_zero:
        results = evaluation_results(records, loaded.block_size, confidence_threshold)
        about = {
            "command": command_line(),
            "draft": str(draft),
            "target": target,
            "block_size": loaded.block_size,
            **asdict(settings),
            "machine": {
                **describe_machine(fabric.device),
                "dtype": str(weights).removeprefix("torch."),
                "processes": fabric.world_size,
            },
        }
        _write(folder, records, about | results)


def _write(folder: Path, records: Sequence[AnswerRecord], results: dict[str, Any]) -> None:
    """Records, results, figures and events; and the tables, on the terminal."""
    write_records(folder / "records.jsonl", records)
    results = results | {"records_digest": records_digest(folder / "records.jsonl")}
    write_text(folder / "evaluation.json", json.dumps(results, indent=2) + "\n")
    with SummaryWriter(str(folder)) as writer:
        for name, summary in ({"all": results["overall"]} | results["datasets"]).items():
            for tag, value in scalars(summary).items():
                writer.add_scalar(f"{name}/{tag}", value)
        figure = evaluation_figure(results)
        write_finished(folder / "evaluation.png", lambda path: figure.savefig(path, format="png", dpi=150))
        writer.add_figure("evaluation", figure)
    print_evaluation(results)
    print(f"Written to {folder}: evaluation.json, evaluation.png, records.jsonl, TensorBoard events")
    if results["overall"]["confidence"] is not None and not results["confidence_threshold"]:
        print(f"Next: {shlex.join(['dspark', 'calibrate', '--records', str(folder / 'records.jsonl')])}")


def _shown(conversations: Sequence[Conversation]) -> Iterator[Conversation]:
    """Go through the conversations under a progress bar."""
    return iter(track(conversations, description="Decoding", console=Console(stderr=True)))

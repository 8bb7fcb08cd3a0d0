"""`dspark evaluate`: what a draft is worth when it really decodes."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from torch.utils.tensorboard import SummaryWriter

from dspark_lightning.datamodules.prompts import Conversation, load_conversations
from dspark_lightning.decoding.records import AnswerRecord, records_digest, write_records
from dspark_lightning.evaluation.evaluate import evaluation_results, play_all, scalars
from dspark_lightning.evaluation.figures import evaluation_figure
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.evaluation.tables import print_evaluation
from dspark_lightning.machine import describe_machine
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.replace import check_folder, write_finished, write_text
from dspark_lightning.tools.command import command_line
from dspark_lightning.tools.target import Dtype, launch_processes, load_placed_target, load_renderer


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
    dtype: Dtype | None = None,
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
    fabric = launch_processes(accelerator, devices, device_map)
    model = load_placed_target(fabric, target, gguf_file, dtype, device_map, attn_implementation, trust_remote_code)
    pair = pair_up(model, loaded)
    renderer = load_renderer(target, gguf_file, trust_remote_code, chat_template, chat_template_kwargs)
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
                "dtype": str(model.dtype).removeprefix("torch."),
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

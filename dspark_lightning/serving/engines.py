"""The serving engines: what they cannot serve, and the commands that start them."""

import json
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import PretrainedConfig

from dspark_lightning.loading import target_source

Engine = Literal["vllm", "sglang", "llamacpp"]
ENGINES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
"""The engines by the names that commands take, with those that people read."""


class EngineLimit(NamedTuple):
    """Something about a draft that engines cannot serve."""

    engines: tuple[Engine, ...]
    line: str


def engine_limits(config: PretrainedConfig) -> list[EngineLimit]:
    """What stands in the way of serving a draft as it is.

    Args:
        config: of the draft.
    """
    limits: list[EngineLimit] = []
    # A draft read from a folder of another tool may not know how many layers its target has.
    last = None if config.num_target_layers is None else config.num_target_layers - 1
    unservable = [i for i in config.target_layer_ids if i in (-1, last)]
    if unservable:
        use = "layers from 0 on, not the last" if last is None else f"layers 0..{last - 1}"
        line = f"SGLang cannot capture feature layer {unservable[0]}: use {use}"
        limits.append(EngineLimit(("sglang",), line))
    if config.markov_rank == 0:
        limits.append(EngineLimit(("sglang",), "SGLang cannot serve a DSpark draft with markov_rank 0"))
    elif config.markov_head_type != "vanilla":
        line = f"vLLM and llama.cpp serve the vanilla Markov head only, not {config.markov_head_type!r}"
        limits.append(EngineLimit(("vllm", "llamacpp"), line))
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        line = "llama.cpp needs a confidence head that reads the Markov embedding"
        limits.append(EngineLimit(("llamacpp",), line))
    return limits


def serve_command(path: Path, target: str, block_size: int) -> str:
    """The command with which vLLM serves an exported draft beside its target."""
    target = target_source(target) if target.startswith("embedded") else target
    speculative = json.dumps({"model": str(path), "num_speculative_tokens": block_size})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)}"


def serve_commands(path: Path, target: str, block_size: int) -> dict[Engine, str]:
    """For each engine the commands that serve an exported draft beside its target; several stand on lines of their own.

    SGLang takes the block size from the draft's config; llama.cpp serves GGUF files only.
    """
    source = target_source(target) if target.startswith("embedded") else target
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", source, "--speculative-algorithm", "DSPARK"]
    gguf = f"{path.name}.gguf"
    llamacpp = [
        ["python", "convert_hf_to_gguf.py", str(path), "--outfile", gguf],
        ["llama-server", "--model", "TARGET.gguf", "--model-draft", gguf],
    ]
    return {
        "vllm": serve_command(path, target, block_size),
        "sglang": shlex.join([*sglang, "--speculative-draft-model-path", str(path)]),
        "llamacpp": "\n".join(map(shlex.join, llamacpp)),
    }

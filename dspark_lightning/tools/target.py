"""The target of a command: processes to run it in, its weights on their devices, and its way of writing prompts."""

from typing import Any, Literal, cast

import torch
from lightning.fabric import Fabric
from torch import nn
from transformers import PreTrainedModel

from dspark_lightning.datamodules.loss_mask import ChatRenderer, read_template
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.loading import load_target

Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def launch_processes(accelerator: str, devices: int, device_map: str | None) -> Fabric:
    """Start the processes of a command; behind this line all of them run.

    Args:
        accelerator: auto, cpu, cuda or another that Lightning knows.
        devices: processes, each with a whole target.
        device_map: where it is given, one process has all devices.

    Raises:
        ValueError: no process, or several with a device_map.
    """
    if devices < 1:
        raise ValueError(f"devices must be 1 or more, got {devices}")
    if device_map is not None and devices > 1:
        raise ValueError(f"device_map {device_map!r} claims all devices for one process: leave out devices {devices}")
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    return fabric


def load_placed_target(
    fabric: Fabric,
    target: str,
    gguf_file: str | None,
    dtype: Dtype | None,
    device_map: str | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a target onto the device of this process; arguments and errors as for `load_target`.

    Args:
        fabric: of this process.
        target: see `load_target`, as the other arguments.
        gguf_file: likewise.
        dtype: None takes float32 on the CPU, bfloat16 elsewhere.
        device_map: likewise; None takes the target to the device of the process.
        attn_implementation: likewise.
        trust_remote_code: likewise.
    """
    weights = _DTYPES[dtype or ("float32" if fabric.device.type == "cpu" else "bfloat16")]
    model = load_target(target, gguf_file, weights, trust_remote_code, attn_implementation, device_map)
    if device_map is None:
        cast(nn.Module, model).to(fabric.device)
    return model


def load_renderer(
    target: str,
    gguf_file: str | None,
    trust_remote_code: bool,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> ChatRenderer:
    """What writes prompts for a target.

    Args:
        target: folder or hub id of the tokenizer, or "embedded".
        gguf_file: name of a GGUF file in it that holds the tokenizer.
        trust_remote_code: whether code that comes with it may run.
        chat_template: Jinja file in place of the tokenizer's template.
        chat_template_kwargs: options of the template.

    Raises:
        ValueError: the tokenizer or the template cannot be read.
    """
    return ChatRenderer(
        load_tokenizer(target, gguf_file, trust_remote_code),
        chat_template=None if chat_template is None else read_template(chat_template),
        template_name=chat_template,
        template_kwargs=chat_template_kwargs,
    )

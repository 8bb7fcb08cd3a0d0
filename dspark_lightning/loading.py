"""Loading a frozen target: from a folder, a hub id or the package; whole, or spread over devices."""

import os
import pickle
import weakref
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from dspark_lightning.embedded import embedded_path, embedded_pictures_path
from dspark_lightning.offload import check_device_map, check_placed_modules

_UNREADABLE = (  # what transformers raises over a folder that it cannot use
    OSError,
    ValueError,
    ImportError,
    RuntimeError,  # also RecursionError, over JSON
    AssertionError,
    SafetensorError,
    pickle.UnpicklingError,
)
_EMBEDDED = {"embedded": embedded_path, "embedded-pictures": embedded_pictures_path}


def target_source(target: str) -> str:
    """Resolve the name of a target: "embedded" and "embedded-pictures" are the tiny ones that ship with the package.

    Raises:
        ValueError: a path that does not exist.
    """
    if target in _EMBEDDED:
        return str(_EMBEDDED[target]())
    looks_like_path = target.startswith((".", "~", os.sep)) or target.count("/") > 1
    path = Path(target).expanduser()
    if looks_like_path and not path.exists():
        raise ValueError(f"target {target!r} does not exist: give a folder, a hub id such as org/name, or 'embedded'")
    return str(path) if path.exists() else target


def load_target_config(target: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the target's config. Arguments and errors as for `load_target`."""
    return cast(PretrainedConfig, _load(AutoConfig, target, {}, trust_remote_code=trust_remote_code))


def load_target(
    target: str,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
) -> PreTrainedModel:
    """Load a target for capturing.

    Args:
        target: model folder, hub id, "embedded" or "embedded-pictures".
        gguf_file: name of a GGUF file inside it, for quantised checkpoints (needs the extra `gguf`).
        dtype: of the weights.
        trust_remote_code: whether code that comes with the model may run.
        attn_implementation: eager, sdpa, flash_attention_2 or another that transformers knows; None leaves it to them.
        device_map: "auto" spreads the target over this machine's GPUs, memory and disk; a device takes it whole; a
            mapping from module names places each module. Needs the package accelerate. Weights that go to disk and
            have another layout in the file are written again to a temporary folder (see TMPDIR).

    Raises:
        ValueError: the target cannot be read, or not this way; one line that names it.
    """
    if device_map is not None:
        check_device_map(device_map)
    options = {"gguf_file": gguf_file, "attn_implementation": attn_implementation, "device_map": device_map}
    options = {name: value for name, value in options.items() if value is not None}
    auto_class = _auto_class(target, gguf_file, trust_remote_code)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="dspark-offload-")) if device_map is not None else None
        model, info = _load(
            auto_class,
            target,
            options,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # so that they come back below, with their names
            output_loading_info=True,
            offload_folder=folder,
        )
        check_placed_modules(device_map, model)
        # transformers would go on with random numbers in their place.
        for name, saved, needed in sorted(info["mismatched_keys"]):
            raise ValueError(
                f"the target {target!r} has {name!r} of shape {tuple(saved)}, its config asks for {tuple(needed)}"
            )
        for name in sorted(info["missing_keys"]):
            raise ValueError(f"the target {target!r} has no weights for {name!r}")
        weakref.finalize(model, stack.pop_all().close)  # what lies in the folder is needed as long as the model
    _keep_dtype_behind_norms(model)
    return cast(PreTrainedModel, model)


def load_empty_target(
    target: str,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Build a target without its weights, on the meta device. Arguments and errors as for `load_target`."""
    options = {"gguf_file": gguf_file} if gguf_file is not None else {}
    config = _load(AutoConfig, target, options, trust_remote_code=trust_remote_code)
    auto_class = _auto_class(target, gguf_file, trust_remote_code)
    options = {"attn_implementation": attn_implementation} if attn_implementation is not None else {}
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **options)
    _keep_dtype_behind_norms(model)
    return cast(PreTrainedModel, model)


def is_quantized(config: PretrainedConfig) -> bool:
    """Whether the target's weights are stored quantised, in a layout that its config alone does not give."""
    return getattr(config, "quantization_config", None) is not None


def _keep_dtype_behind_norms(model: nn.Module) -> None:
    """Norms that stay fp32 in a half-precision target hand on what they were given.

    Those of DeepSeek V4 do not in every version of transformers, and the projection behind them then refuses fp32.
    """
    if cast(PreTrainedModel, model).dtype == torch.float32:
        return
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor):
            module.register_forward_hook(lambda _, inputs, output: output.to(inputs[0].dtype))


def _auto_class(target: str, gguf_file: str | None, trust_remote_code: bool) -> Any:
    """The class of transformers that loads this target with its head; many that also read images are not causal LMs."""
    if gguf_file is not None:
        return AutoModelForCausalLM
    config = load_target_config(target, trust_remote_code)
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote and "AutoModelForCausalLM" not in remote:
        for name in remote:
            if name.startswith("AutoModel") and hasattr(transformers, name):
                return getattr(transformers, name)
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _load(auto_class: Any, target: str, options: dict[str, Any], **kwargs: Any) -> Any:
    """`from_pretrained` with `options`, which an error names, and further arguments."""
    source = target_source(target)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        return auto_class.from_pretrained(source, **options, **kwargs)
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "its weights are a pickle that holds more than tensors, which is not run: give it as safetensors"
        if "trust_remote_code" in str(error):
            reason = "it runs code that comes with it: read that code, then set trust_remote_code to true"
        given = ", ".join(f"{name} {value!r}" for name, value in options.items())
        raise ValueError(f"cannot read the target {target!r}{f' ({given})' if given else ''}: {reason}") from error
    finally:
        hf_logging.set_verbosity(verbosity)

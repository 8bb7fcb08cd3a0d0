"""RoPE inverse frequencies stay fp32, by value.

A rounded table is silent poison: at head_dim 128 and theta 1e6, bf16 frequencies put the cosine off by 0.58 after 512
tokens and by 2.0 after 4096. Casting a module, materialising it from the meta device and mixed-precision policies all
spoil the table in their own way, so values are compared with a freshly built table, not only dtypes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# These recompute `inv_freq` from the sequence length; only their `original_inv_freq` has one right value.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_TOLERANCE = 1e-6


def pin_rope_inv_freq_fp32(rotary_emb: nn.Module | None) -> None:
    """Bring the frequencies of one rotary module back to fp32, with the values its config gives.

    Nothing happens for None or when they are fp32 already (`repair_rope` looks at the values too).

    Args:
        rotary_emb: a rotary module of transformers, with its config; or None.

    Raises:
        ValueError: the module holds no config to rebuild the values from.
    """
    if rotary_emb is None:
        return
    if any(buffer.dtype != torch.float32 for _, buffer in _frequency_buffers(rotary_emb)):
        _rebuild(rotary_emb)


def rope_errors(model: nn.Module) -> list[str]:
    """Compare every rotary module inside `model` with a freshly built one.

    Returns:
        one line per frequency buffer that is not fp32 or differs by more than 1e-6 of its value; empty if all is well.
    """
    errors = []
    for path, rotary in rotary_modules(model):
        fresh = _fresh_frequencies(rotary)
        for name, buffer in _frequency_buffers(rotary):
            where = f"{path}.{name}" if path else name
            error = 0.0 if buffer.is_meta or name not in fresh else _relative_error(buffer, fresh[name])
            if buffer.dtype != torch.float32:
                dtype = str(buffer.dtype).removeprefix("torch.")
                errors.append(f"{where} is {dtype} and off by {error:.1e} of its value, must be float32")
            elif not error <= _TOLERANCE:  # written so that NaN is an error
                errors.append(f"{where} is off by {error:.1e} of its value")
    return errors


def repair_rope(model: nn.Module) -> None:
    """Rebuild the frequencies of every rotary module inside `model`, in fp32 and on the device they are on."""
    for _, rotary in rotary_modules(model):
        _rebuild(rotary)


def rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of everything that owns inverse frequencies and the config they come from."""
    for path, module in model.named_modules():
        path = path.replace("_fsdp_wrapped_module.", "")
        if hasattr(module, "config") and any(True for _ in _frequency_buffers(module)):
            yield path, module


def _frequency_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """One rotary can hold several tables, such as Gemma 4's `full_attention_inv_freq`."""
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith("inv_freq"):
            yield name, buffer


def _fresh_frequencies(rotary: nn.Module) -> dict[str, Tensor]:
    """Build the module anew on the CPU and return the tables that have one right value."""
    with torch.device("cpu"):
        fresh = type(rotary)(rotary.config)
    length_dependent = str(getattr(rotary, "rope_type", "")) in _LENGTH_DEPENDENT
    return {
        name: buffer.float()
        for name, buffer in _frequency_buffers(fresh)
        if not (length_dependent and "original" not in name)
    }


def _rebuild(rotary: nn.Module) -> None:
    if not hasattr(rotary, "config"):
        raise ValueError(f"cannot rebuild the RoPE frequencies of {type(rotary).__name__}: it has no .config")
    with torch.device("cpu"):
        fresh = type(rotary)(rotary.config)
    tables = dict(_frequency_buffers(fresh))
    for name, buffer in list(_frequency_buffers(rotary)):
        if not buffer.is_meta:
            setattr(rotary, name, tables[name].float().to(buffer.device))
    if hasattr(fresh, "max_seq_len_cached"):  # the length that length-dependent tables stand for
        rotary.max_seq_len_cached = fresh.max_seq_len_cached


def _relative_error(buffer: Tensor, fresh: Tensor) -> float:
    """Largest difference in units of the right value; infinite for a wrong shape, NaN for garbage that is NaN."""
    if buffer.shape != fresh.shape:
        return float("inf")
    difference = (buffer.detach().cpu() - fresh).abs()
    return float((difference / fresh.abs().clamp(min=torch.finfo(torch.float32).tiny)).max())

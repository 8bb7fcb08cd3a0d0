"""What several tests need: the golden cases and tiny random targets. Import it as `from helpers import load_case`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

GOLDEN = Path(__file__).parent / "golden"
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class GoldenCase:
    """One folder of tests/golden, as its README describes it. A tensor file that the folder lacks is an empty dict."""

    case: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


def load_case(name: str) -> GoldenCase:
    """Read the golden case `name`, such as "draft/qwen3_vanilla"."""
    folder = GOLDEN / name

    def tensors(part: str) -> dict[str, torch.Tensor]:
        path = folder / f"{part}.safetensors"
        return load_file(path) if path.exists() else {}

    case = json.loads((folder / "case.json").read_text())
    return GoldenCase(case, *(tensors(part) for part in ("inputs", "expected", "state", "grads")))


def tiny_qwen3_config(**changes: Any) -> Qwen3Config:
    """A Qwen3 configuration of `TINY` size, head_dim 16, with `changes` to its fields."""
    return Qwen3Config(**{"architectures": ["Qwen3ForCausalLM"], **TINY, "head_dim": 16, **changes})


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    """A Llama configuration of `TINY` size, head_dim 8, with `changes` to its fields."""
    return LlamaConfig(**{"architectures": ["LlamaForCausalLM"], **TINY, "head_dim": 8, **changes})


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 target in eval mode, the same for the same seed; leaves the global generator alone."""
    with seeded(seed):
        return Qwen3ForCausalLM(tiny_qwen3_config(**changes)).eval()


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama target in eval mode, the same for the same seed; leaves the global generator alone."""
    with seeded(seed):
        return LlamaForCausalLM(tiny_llama_config(**changes)).eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with the global generator at `seed`, then put it back where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def assert_same(ours: torch.Tensor, expected: torch.Tensor, name: str = "values") -> None:
    """Equal to 1e-5 of the largest entry: what fp32 leaves of one computation done in two ways."""
    assert ours.shape == expected.shape, f"{name}: {tuple(ours.shape)} instead of {tuple(expected.shape)}"
    error = (ours - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error <= 1e-5, f"{name} are off by {error:.1e} of the largest entry"

"""Tiny random vision-language targets of every family, with their processors, without downloading anything.

    python scripts/tiny_vlm.py qwen3_vl targets/tiny-qwen3-vl

writes a model folder with its processor beside the weights. Everything that fits is the family's own: the classes, the
names of the special tokens, the form of the chat template, how an image becomes placeholders. The words are those of
the embedded target's tokenizer.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoTokenizer,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from dspark_lightning.datamodules.processor import processor_of_parts
from dspark_lightning.embedded import embedded_path
from dspark_lightning.loading import load_target_config
from tiny_target import GROUPED_HEADS, SIZES, gemma4_text, minimax_m3_text, spread_logits

MAX_IMAGE_TOKENS = 16  # of every family but Gemma 4, whose image processor knows no budget below 70
QWEN_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
GEMMA4_TOKENS = {
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
GEMMA4_MARKERS = {
    "start": "<|turn>",
    "end": "<turn|>",
    "image": "<|image|>",
    "video": "<|video|>",
    "assistant": "model",
}
MINIMAX_TOKENS = [
    *("]~!b[", "]~b]", "[e~["),
    *("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
]
TEMPLATE = """\
{%- macro text(content) %}
{%- if content is string %}
{{- content }}
{%- else %}
{%- for part in content %}
{{- part['text'] if part['type'] == 'text' else video if part['type'] == 'video' else image }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{{- bos }}
{%- if default_system and messages[0]['role'] != 'system' %}
{{- start + 'system\\n' + default_system + end + '\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- start + assistant + '\\n' }}
{%- generation %}
{{- text(message['content']) + end }}
{%- endgeneration %}
{%- else %}
{{- start + message['role'] + '\\n' + text(message['content']) + end }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- start + assistant + '\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TinyVlm:
    """What makes a family: its model, its processor, its special tokens and the markers of its chat template."""

    model: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
    processor: str  # a class of transformers; older versions import Gemma 4's with torchvision only
    image_processor: Callable[[], Any]
    special_tokens: list[str] | dict[str, str]  # with names where the family's tokenizer has them as attributes
    bos: str = ""
    start: str = "<|im_start|>"
    end: str = "<|im_end|>"
    image: str = "<|vision_start|><|image_pad|><|vision_end|>"
    video: str = "<|vision_start|><|video_pad|><|vision_end|>"
    assistant: str = "assistant"
    default_system: str = ""


def _qwen_image_processor(patch_size: int) -> Callable[[], Any]:
    side = 2 * patch_size  # of the pixels that become one token
    size = {"shortest_edge": side**2, "longest_edge": MAX_IMAGE_TOKENS * side**2}
    return lambda: Qwen2VLImageProcessorPil(patch_size=patch_size, size=size)


def _gemma4_image_processor(patch_size: int, pooled: int) -> Callable[[], Any]:
    return lambda: transformers.Gemma4ImageProcessorPil(
        patch_size=patch_size, pooling_kernel_size=pooled, max_soft_tokens=70
    )


def _qwen_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Rotary embeddings of three axes: time, height and width of an image."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    # Attention of weights near zero would not tell one position from another.
    return {**SIZES, **GROUPED_HEADS, **_ids(tokenizer), "rope_parameters": rope, "initializer_range": 0.1}


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> Any:
    return tokenizer.convert_tokens_to_ids(token)


def _qwen_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
    }


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],  # the other layer sees windows of four tokens
    }
    config = Qwen2_5_VLConfig(text_config=_qwen_text(tokenizer), vision_config=tower, **_qwen_ids(tokenizer))
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],  # what this layer finds is added behind the first layer of the text
    }
    config = Qwen3VLConfig(text_config=_qwen_text(tokenizer), vision_config=tower, **_qwen_ids(tokenizer))
    return Qwen3VLForConditionalGeneration(config)


def _gemma4_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The tokens of an image see each other in both directions, as in the larger models of the family."""
    text = gemma4_text(len(tokenizer), keys_are_values=True)
    return {**text, **_ids(tokenizer), "use_bidirectional_attention": "vision"}


def _gemma4_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    kinds = ("image", "boi", "eoi", "audio", "boa", "video")
    ids = {f"{kind}_token_id": _id(tokenizer, GEMMA4_TOKENS[f"{kind}_token"]) for kind in kinds}
    return {**ids, "eoa_token_index": _id(tokenizer, GEMMA4_TOKENS["eoa_token"])}


def _gemma4(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        **_gemma4_text(tokenizer),
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": len(tokenizer),
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 256,
    }
    config = Gemma4Config(text_config=text, vision_config=tower, audio_config=None, **_gemma4_ids(tokenizer))
    return Gemma4ForConditionalGeneration(config)


def _gemma4_unified(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """No tower: patches are projected, and the layers of the text read them."""
    patches = {
        "patch_size": 4,
        "model_patch_size": 12,
        "mm_embed_dim": 32,
        "mm_posemb_size": 256,
        "output_proj_dims": 32,
    }
    config = Gemma4UnifiedConfig(
        text_config=_gemma4_text(tokenizer),
        vision_config=patches,
        audio_config=None,
        **_gemma4_ids(tokenizer),
    )
    return Gemma4UnifiedForConditionalGeneration(config)


def _minimax_m3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    tower = {
        "hidden_size": 48,  # each head's width is cut into the axes of a 3-D rotary embedding
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 112,
    }
    config = MiniMaxM3VLConfig(
        text_config={**minimax_m3_text(len(tokenizer)), **_ids(tokenizer)},
        vision_config=tower,
        projector_hidden_size=64,
        image_token_index=_id(tokenizer, "]<]image[>["),
        video_token_index=_id(tokenizer, "]<]video[>["),
    )
    return MiniMaxM3SparseForConditionalGeneration(config)


TINY_VLMS: dict[str, TinyVlm] = {
    "qwen2_5_vl": TinyVlm(
        _qwen2_5_vl,
        "Qwen2_5_VLProcessor",
        _qwen_image_processor(patch_size=14),
        QWEN_TOKENS,
        default_system="You are a helpful assistant.",
    ),
    "qwen3_vl": TinyVlm(_qwen3_vl, "Qwen3VLProcessor", _qwen_image_processor(patch_size=16), QWEN_TOKENS),
    "gemma4_vl": TinyVlm(_gemma4, "Gemma4Processor", _gemma4_image_processor(4, 3), GEMMA4_TOKENS, **GEMMA4_MARKERS),
    "gemma4_unified_vl": TinyVlm(
        _gemma4_unified,
        "Gemma4UnifiedProcessor",
        _gemma4_image_processor(12, 1),  # patches as large as what one token sees are all that its own does differently
        GEMMA4_TOKENS,
        **GEMMA4_MARKERS,
    ),
    "minimax_m3_vl": TinyVlm(
        _minimax_m3_vl,
        "MiniMaxM3VLProcessor",
        _qwen_image_processor(patch_size=14),
        MINIMAX_TOKENS,
        bos="]~!b[",
        start="]~b]",
        end="[e~[",
        image="]<]image[>[",
        video="]<]video[>[",
        assistant="ai",
    ),
}
"""The families by name."""


def chat_template(family: str, generation_tags: bool = False) -> str:
    """The chat template of a family, in the form of the published one.

    Args:
        family: a key of `TINY_VLMS`.
        generation_tags: mark what the assistant says, as published templates do not.
    """
    vlm = TINY_VLMS[family]
    names = ("bos", "start", "end", "image", "video", "assistant", "default_system")
    markers = "".join(f"{{%- set {name} = {json.dumps(getattr(vlm, name))} %}}\n" for name in names)
    template = markers + TEMPLATE
    if generation_tags:
        return template
    return template.replace("{%- generation %}\n", "").replace("{%- endgeneration %}\n", "")


def build_tiny_processor(family: str) -> ProcessorMixin:
    """The processor of a family: for text and images; at most 16 tokens for an image, or about 70 for Gemma 4."""
    vlm, template = TINY_VLMS[family], chat_template(family)
    tokenizer = AutoTokenizer.from_pretrained(
        embedded_path(), extra_special_tokens=vlm.special_tokens, eos_token=vlm.end, chat_template=template
    )
    return processor_of_parts(
        getattr(transformers, vlm.processor),
        {"chat_template": template},
        image_processor=vlm.image_processor(),
        tokenizer=tokenizer,
    )


def build_tiny_vlm(family: str, seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A random target in eval mode, the same for the same seed, and its processor. Leaves the global generator alone.

    Args:
        family: a key of `TINY_VLMS`.
        seed: of the weights.

    Raises:
        ValueError: an unknown family.
    """
    if family not in TINY_VLMS:
        raise ValueError(f"there is no tiny vision-language target {family!r}: known are {', '.join(TINY_VLMS)}")
    processor = build_tiny_processor(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_VLMS[family].model(processor.tokenizer)
        model.eval()
        words = load_target_config("embedded").vocab_size  # the family's special tokens come behind them
        spread_logits(model, torch.randint(words, (4, 64)))
    return model, processor


def write_tiny_vlm(family: str, folder: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Write a tiny target with its processor. Returns both.

    Args:
        family: a key of `TINY_VLMS`.
        folder: created where it is missing.

    Raises:
        ValueError: an unknown family.
    """
    model, processor = build_tiny_vlm(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def main() -> None:
    """Write one tiny vision-language target."""
    parser = argparse.ArgumentParser(description="Write a tiny random vision-language target of one family.")
    parser.add_argument("family", choices=list(TINY_VLMS), metavar="FAMILY", help=", ".join(TINY_VLMS))
    parser.add_argument("folder", type=Path, help="where to write it, such as targets/tiny-qwen3-vl")
    arguments = parser.parse_args()
    model, processor = write_tiny_vlm(arguments.family, arguments.folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Wrote {arguments.folder}: {type(model).__name__}, {parameters:,} parameters, "
        f"vocabulary of {len(processor.tokenizer):,} tokens, {type(processor).__name__}"
    )
    config = f"configs/tiny/{arguments.family.replace('gemma4_unified', 'gemma4')}.yaml"
    print(f"Next: dspark fit --config {config} --model.init_args.target {arguments.folder}")


if __name__ == "__main__":
    main()

"""Build the tiny target that reads pictures, which ships with the package, and the rows that it answers.

    OMP_NUM_THREADS=1 python scripts/build_picture_target.py dspark_lightning/assets/pictures

trains a byte-level BPE tokenizer and a Qwen3-VL model on generated pictures, of which it sees none twice in a stage,
then lets it write the answers, greedily, to questions about other pictures. All seeds are fixed: the pictures, the
questions and the tokenizer come out equal, the weights up to the rounding of the machine. It takes about 7 minutes of
one core. What was shipped printed, among other lines,

    tower, step 400: loss 0.021 after 24 s
    target, step 400: loss 0.622 after 87 s
    target, step 800: loss 0.055 after 167 s
    target, step 1200: loss 0.012 after 279 s
    target, step 1600: loss 0.000 after 390 s
    train.jsonl: 1200 rows, 99.8% of the answers right
    heldout.jsonl: 150 rows, 100.0% of the answers right
    held-out answers right with wrong pictures: 0.0%
    held-out tokens right: 100.0%, with wrong pictures: 33.4%
"""

import argparse
import base64
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BatchFeature,
    GenerationConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from dspark_lightning.datamodules.processor import processor_of_parts
from picture_task import CELL, COLOURS, EMPTY, SHAPES, SIDE, Example, examples
from tiny_vlm import QWEN_TOKENS, chat_template

SEED = 0  # of the weights, and of what the target is trained on
TOWER_SEED, TRAIN_SEED, HELDOUT_SEED = 1, 2, 3  # of other pictures
TRAIN_ROWS = 1_200
HELDOUT_ROWS = 150
LEAST_TOKENS = 14  # of an answer that becomes a row
VOCAB_SIZE = 430  # with which every word is one token, at the start of an answer too
TOWER_STEPS = 400
TRAINING_STEPS = 1_600
BATCH_SIZE = 24
PAD, END, MASK = "<|endoftext|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, *QWEN_TOKENS, MASK)
SEEN_COLOURS, SEEN_SHAPES = [*COLOURS, EMPTY[0]], [*SHAPES, EMPTY[1]]
TRAIT_SIZES = (len(SEEN_COLOURS), len(SEEN_SHAPES), SIDE**2)


def build_processor() -> ProcessorMixin:
    """A byte-level BPE trained on what is said about pictures, and an image processor that leaves them as they are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    said = islice(examples(SEED), 5_000)
    tokenizer.train_from_iterator(chain.from_iterable((row.question, row.answer) for row in said), trainer)
    wrap: Any = PreTrainedTokenizerFast
    template = chat_template("qwen3_vl")
    return processor_of_parts(
        Qwen3VLProcessor,
        {"chat_template": template},
        image_processor=Qwen2VLImageProcessorPil(
            patch_size=CELL // 2,
            merge_size=2,
            size={"shortest_edge": (SIDE * CELL) ** 2, "longest_edge": (SIDE * CELL) ** 2},
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        ),
        tokenizer=wrap(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=END,
            mask_token=MASK,
            additional_special_tokens=[token for token in QWEN_TOKENS if token != END],
            chat_template=template,
            clean_up_tokenization_spaces=False,
        ),
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """An untrained target of 1.0 million parameters."""
    ids = dict(zip(SPECIAL_TOKENS, cast(list[int], tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [6, 5, 5]},
        "initializer_range": 0.05,
        "pad_token_id": ids[PAD],
        "eos_token_id": ids[END],
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": CELL // 2,
        "num_position_embeddings": (2 * SIDE) ** 2,  # one for each patch
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen3VLForConditionalGeneration(config)


def encode(processor: ProcessorMixin, rows: list[Example], answered: bool = True) -> BatchFeature:
    """What the model takes. Padded on the left, so that generated tokens follow, and answers end together."""
    return cast(
        BatchFeature,
        cast(Any, processor)(
            images=[row.picture.convert("RGB") for row in rows],
            text=[_prompt(processor, row) + (row.answer + END if answered else "") for row in rows],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ),
    )


def _prompt(processor: ProcessorMixin, row: Example) -> str:
    content = [{"type": "image"}, {"type": "text", "text": row.question}]
    chat: Any = [{"role": "user", "content": content}]
    return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def answer_mask(processor: ProcessorMixin, rows: list[Example], width: int) -> Tensor:
    """Which of the `width` last tokens of each row belong to the answer or end it, [B, width]."""
    tokenizer: Any = cast(Any, processor).tokenizer
    lengths = [len(ids) for ids in tokenizer([row.answer + END for row in rows])["input_ids"]]
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def answer_logits(
    model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin, rows: list[Example]
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] for all tokens of all answers, and those tokens [T]."""
    batch = encode(processor, rows)
    mask = answer_mask(processor, rows, batch["input_ids"].shape[1])
    hidden = cast(Any, model.model)(**batch, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, :-1][mask[:, 1:]]), batch["input_ids"][mask]


def train(parameters: list[nn.Parameter], losses: Iterator[Tensor], steps: int, name: str) -> None:
    """AdamW: warm-up over 5 % of the steps, constant to a third, then down linearly."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(20 * (step + 1) / steps, 1, max(1.5 * (1 - step / steps), 0.02))
    )
    recent: list[float] = []
    started = time.monotonic()
    for step, loss in enumerate(islice(losses, steps), start=1):
        optimizer.zero_grad()
        cast(Any, loss).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"{name}, step {step}: loss {sum(recent) / 100:.3f} after {seconds:.0f} s", flush=True)
            recent.clear()


def batches(seed: int) -> Iterator[list[Example]]:
    """Endless batches; rows of like length go together."""
    source = examples(seed)
    while True:
        window = sorted(islice(source, 16 * BATCH_SIZE), key=lambda row: len(row.answer))
        starts = torch.randperm(16) * BATCH_SIZE
        yield from (window[start : start + BATCH_SIZE] for start in starts.tolist())


def tower_losses(tower: nn.Module, probe: nn.Module, processor: ProcessorMixin) -> Iterator[Tensor]:
    """How badly a linear probe names, off each of the tower's tokens, colour, shape and place of what is in its cell.

    Without this lesson, most of the training passes before the text finds something to read in the picture.
    """
    for rows in batches(TOWER_SEED):
        batch = cast(Any, processor).image_processor([row.picture.convert("RGB") for row in rows], return_tensors="pt")
        seen = cast(Any, tower)(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
        cells = [cell for row in rows for line in row.grid for cell in line]
        traits = [
            torch.tensor([SEEN_COLOURS.index(colour) for colour, _ in cells]),
            torch.tensor([SEEN_SHAPES.index(shape) for _, shape in cells]),
            torch.arange(SIDE**2).repeat(len(rows)),
        ]
        logits = [
            part
            for tokens in (seen.pooler_output, *seen.deepstack_features)
            for part in probe(tokens).split(TRAIT_SIZES, dim=-1)
        ]
        yield torch.stack([cross_entropy(part, traits[i % len(traits)]) for i, part in enumerate(logits)]).mean()


def target_losses(model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin) -> Iterator[Tensor]:
    """Mean negative log-likelihood, in nats, of the tokens of the answers."""
    for rows in batches(SEED):
        yield cross_entropy(*answer_logits(model, processor, rows))


def train_target(processor: ProcessorMixin) -> Qwen3VLForConditionalGeneration:
    """Train a target: first its tower, then all of it. It never sees one picture twice in a stage."""
    torch.manual_seed(SEED)
    model = build_model(cast(Any, processor).tokenizer).train()
    tower = cast(nn.Module, model.model.visual)
    probe = nn.Linear(model.config.text_config.hidden_size, sum(TRAIT_SIZES))
    train([*tower.parameters(), *probe.parameters()], tower_losses(tower, probe, processor), TOWER_STEPS, "tower")
    train(list(model.parameters()), target_losses(model, processor), TRAINING_STEPS, "target")
    return cast(Qwen3VLForConditionalGeneration, model.eval())


@torch.inference_mode()
def write_answers(
    model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin, rows: list[Example], batch_size: int = 50
) -> list[str | None]:
    """Let the target answer, greedily. None stands for an answer that reached the token limit, or is too short."""
    tokenizer: Any = cast(Any, processor).tokenizer
    answers: list[str | None] = []
    for start in range(0, len(rows), batch_size):
        batch = encode(processor, rows[start : start + batch_size], answered=False)
        output = cast(Any, model).generate(**batch)
        for tokens in output[:, batch["input_ids"].shape[1] :].tolist():
            length = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else 0
            answers.append(tokenizer.decode(tokens[:length]) if length >= LEAST_TOKENS else None)
    return answers


def to_row(row: Example, answer: str) -> dict[str, Any]:
    """A row of the data file."""
    file = io.BytesIO()
    row.picture.save(file, "PNG", optimize=True)
    picture = {"type": "image", "base64": base64.b64encode(file.getvalue()).decode()}
    question = {"type": "text", "text": row.question}
    return {
        "conversation": [
            {"role": "user", "content": [picture, question]},
            {"role": "assistant", "content": answer},
        ]
    }


def with_wrong_pictures(rows: list[Example]) -> list[Example]:
    """Every row gets the picture of the row behind it."""
    return [replace(row, picture=other.picture) for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]


@torch.inference_mode()
def token_accuracy(model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin, rows: list[Example]) -> float:
    """Share of the tokens of the right answers that the target finds the likeliest behind those before them."""
    logits, tokens = answer_logits(model, processor, rows)
    return (logits.argmax(dim=-1) == tokens).float().mean().item()


def right_answers(rows: list[Example], answers: list[str | None]) -> float:
    """Share of the answers that are right, word for word."""
    return sum(row.answer == answer for row, answer in zip(rows, answers, strict=True)) / len(rows)


def save_target(model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin, folder: Path) -> None:
    """Write the target in bf16 with its processor. The model goes on with the rounded weights, in fp32."""
    tokenizer: Any = cast(Any, processor).tokenizer
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    cast(Any, model).to(torch.bfloat16)
    model.save_pretrained(folder)
    cast(Any, processor).save_pretrained(folder)
    model.float()


def save_rows(
    model: Qwen3VLForConditionalGeneration, processor: ProcessorMixin, rows: list[Example], path: Path
) -> None:
    """Write the rows with the target's answers."""
    answers = write_answers(model, processor, rows)
    kept = [to_row(row, answer) for row, answer in zip(rows, answers, strict=True) if answer is not None]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{path.name}: {len(kept)} rows, {right_answers(rows, answers):.1%} of the answers right")


def main() -> None:
    """Build everything into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Build the embedded target that reads pictures, and its rows.")
    parser.add_argument("folder", type=Path, help="where to write target/, train.jsonl and heldout.jsonl")
    folder: Path = parser.parse_args().folder

    processor = build_processor()
    model = train_target(processor)
    save_target(model, processor, folder / "target")
    train_rows = list(islice(examples(TRAIN_SEED), TRAIN_ROWS))
    heldout_rows = list(islice(examples(HELDOUT_SEED), HELDOUT_ROWS))
    save_rows(model, processor, train_rows, folder / "train.jsonl")
    save_rows(model, processor, heldout_rows, folder / "heldout.jsonl")
    wrong = with_wrong_pictures(heldout_rows)
    right = right_answers(heldout_rows, write_answers(model, processor, wrong))
    print(f"held-out answers right with wrong pictures: {right:.1%}")
    accuracies = [token_accuracy(model, processor, rows) for rows in (heldout_rows, wrong)]
    print("held-out tokens right: {:.1%}, with wrong pictures: {:.1%}".format(*accuracies))


if __name__ == "__main__":
    main()

"""Build the tiny target that ships with the package, and the chat rows that it answers.

    OMP_NUM_THREADS=1 python scripts/build_embedded_target.py dspark_lightning/assets

trains a byte-level BPE tokenizer and a Qwen3 model on generated chats, then lets the model write the answers of the
training and the held-out rows, at temperature 1 over its whole vocabulary (so `generation_config.json` says). Neither
the tokenizer nor the model ever saw a held-out question. All seeds are fixed: the rows and the tokenizer come out
equal, the weights up to the rounding of the machine. It takes about 13 minutes of one core. What was shipped printed

    step 100: loss 4.024 after 91 s
    step 400: loss 0.718 after 296 s
    step 800: loss 0.419 after 570 s
    step 1200: loss 0.314 after 814 s
    step 1600: loss 0.204 after 986 s
    held-out loss 0.177
    train.jsonl: 2400 rows, 2 of them cut
    heldout.jsonl: 200 rows, 0 of them cut

(every fourth of the lines `step`, beside the first, on a shared machine). The free choice of wording alone costs 0.1.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from embedded_corpus import Messages, generate_rows, user_turns

SEED = 0
CORPUS_ROWS = 24_000
HELDOUT_ROWS = 200
TRAIN_ROWS = 2_400  # answered by the target; it is trained on all rows that are not held out
VOCAB_SIZE = 1024
TRAINING_STEPS = 1_600
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>")
PAD, END, *_ = range(len(SPECIAL_TOKENS))
GENERATION = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "max_new_tokens": 128,
}
IGNORED = -100
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}"""

Example = tuple[list[int], list[int]]
"""Token ids of a row, and 1 for each that an assistant wrote (its `<|end|>` too), 0 for the others."""


def split_rows(rows: list[Messages]) -> tuple[list[Messages], list[Messages]]:
    """The held-out rows, and the others."""
    return rows[:HELDOUT_ROWS], rows[HELDOUT_ROWS:]


def build_tokenizer(rows: list[Messages]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on what is said in `rows`. Every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for row in rows for message in row), trainer)
    pad, end, *roles, mask = SPECIAL_TOKENS
    wrap: Any = PreTrainedTokenizerFast
    return cast(
        PreTrainedTokenizerFast,
        wrap(
            tokenizer_object=tokenizer,
            pad_token=pad,
            eos_token=end,
            mask_token=mask,
            additional_special_tokens=roles,
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=False,
        ),
    )


def build_model() -> Qwen3ForCausalLM:
    """An untrained target of 1.4 million parameters."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[Messages]) -> list[Example]:
    """Render every row with the chat template."""
    options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = [cast(dict[str, list[int]], tokenizer.apply_chat_template(row, **options)) for row in rows]
    return [(row["input_ids"], row["assistant_masks"]) for row in encoded]


def collate(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Right-padded token ids, and labels that are `IGNORED` outside the assistant turns, both [B, S]."""
    width = max(len(ids) for ids, _ in examples)
    token_ids = torch.full((len(examples), width), PAD)
    labels = torch.full((len(examples), width), IGNORED)
    for row, (ids, mask) in enumerate(examples):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(ids).where(torch.tensor(mask).bool(), torch.tensor(IGNORED))
    return token_ids, labels


def batches(examples: list[Example], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled batches. Rows of like length go together, chosen within windows of 16 batches."""
    rng = random.Random(SEED)
    window = 16 * batch_size
    while True:
        shuffled = rng.sample(examples, len(examples))
        windows = [shuffled[i : i + window] for i in range(0, len(shuffled), window)]
        ordered = [example for rows in windows for example in sorted(rows, key=lambda example: len(example[0]))]
        starts = range(0, len(ordered) - batch_size + 1, batch_size)
        for start in rng.sample(starts, len(starts)):
            yield collate(ordered[start : start + batch_size])


def answer_loss(model: Qwen3ForCausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats, of the labelled tokens. Causality hides the padding on the right."""
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
    labelled = labels[:, 1:] != IGNORED
    return cross_entropy(model.lm_head(hidden[labelled]), labels[:, 1:][labelled])


def train_target(examples: list[Example], steps: int, batch_size: int = 32) -> tuple[Qwen3ForCausalLM, list[float]]:
    """Train a target with AdamW: warm-up over 5 % of the steps, constant to a third, then down linearly.

    Returns:
        the model in eval mode, and the loss of every step.
    """
    torch.manual_seed(SEED)
    model: Any = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(20 * (step + 1) / steps, 1, max(1.5 * (1 - step / steps), 0.02))
    )
    losses: list[float] = []
    started = time.monotonic()
    for token_ids, labels in islice(batches(examples, batch_size), steps):
        loss: Any = answer_loss(model, token_ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            recent, seconds = sum(losses[-100:]) / 100, time.monotonic() - started
            print(f"step {len(losses)}: loss {recent:.3f} after {seconds:.0f} s", flush=True)
    return model.eval(), losses


def write_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Messages], batch_size: int = 128
) -> list[dict[str, Any]]:
    """Ask the user turns of `rows` and let the target write every answer, turn after turn.

    Returns:
        rows with the key `messages`, in the same order. A row with an answer that reached the token limit ends there
        and has `truncated: true`.
    """
    torch.manual_seed(SEED)
    asked = [user_turns(row) for row in rows]
    answered: list[dict[str, Any]] = [{"messages": []} for _ in rows]
    for turn in range(max(map(len, asked))):
        waiting = [i for i in range(len(rows)) if turn < len(asked[i]) and "truncated" not in answered[i]]
        for i in waiting:
            answered[i]["messages"].append({"role": "user", "content": asked[i][turn]})
        for start in range(0, len(waiting), batch_size):
            chosen = [answered[i] for i in waiting[start : start + batch_size]]
            for row, tokens in zip(chosen, _sample(model, tokenizer, [row["messages"] for row in chosen]), strict=True):
                complete = END in tokens
                text = tokenizer.decode(tokens[: tokens.index(END)] if complete else tokens, skip_special_tokens=True)
                row["messages"].append({"role": "assistant", "content": text})
                if not complete:
                    row["truncated"] = True
    return answered


def _sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: list[Messages]) -> list[list[int]]:
    """The next assistant turn of every chat, as token ids that may hold padding after `<|end|>`."""
    options: dict[str, Any] = {"return_dict": True, "return_tensors": "pt", "padding": True}
    options["tokenizer_kwargs"] = {"padding_side": "left"}
    prompts = cast(Any, tokenizer.apply_chat_template(chats, add_generation_prompt=True, **options))
    output = cast(Any, model).generate(**prompts)
    return cast(list[list[int]], output[:, prompts["input_ids"].shape[1] :].tolist())


def main() -> None:
    """Build everything into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Build the embedded target and its chat rows.")
    parser.add_argument("folder", type=Path, help="where to write target/, train.jsonl and heldout.jsonl")
    folder: Path = parser.parse_args().folder

    heldout, train = split_rows(generate_rows(CORPUS_ROWS, SEED))
    tokenizer = build_tokenizer(train)
    model: Any = train_target(encode(tokenizer, train), TRAINING_STEPS)[0]
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig.from_dict(GENERATION)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    model.float()  # the rounded weights, in the arithmetic of the tests
    with torch.inference_mode():
        loss = answer_loss(model, *collate(encode(tokenizer, heldout)))
    print(f"held-out loss {loss:.3f}")
    for name, rows in (("train", train[:TRAIN_ROWS]), ("heldout", heldout)):
        answered = write_answers(model, tokenizer, rows)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in answered]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}.jsonl: {len(rows)} rows, {sum('truncated' in row for row in answered)} of them cut")


if __name__ == "__main__":
    main()

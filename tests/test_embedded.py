"""The embedded target and its chat rows: what is shipped, and that the script rebuilds it."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from dspark_lightning.embedded import embedded_data, embedded_path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PAD, END, SYSTEM, USER, ASSISTANT, MASK = range(6)
NLL_BOUND = 0.3  # nats a token; a uniform guess would be ln 1024 = 6.9, the free choice of wording alone costs 0.1
Row = dict[str, Any]


def read_rows(split: str) -> list[Row]:
    return [json.loads(line) for line in embedded_data(split).read_text().splitlines()]  # type: ignore[arg-type]


def user_turns(row: Row) -> tuple[str, ...]:
    return tuple(message["content"] for message in row["messages"] if message["role"] == "user")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(embedded_path())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    """The script, imported as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("build_embedded_target")


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'train' and 'heldout', got 'test'"):
        embedded_data("test")  # type: ignore[arg-type]


def test_target_is_a_qwen3_of_one_to_two_million_parameters(model: PreTrainedModel) -> None:
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000


def test_weights_lie_in_bf16_and_are_complete(model: PreTrainedModel) -> None:
    stored = load_file(embedded_path() / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert set(stored) == {name for name, _ in model.named_parameters()}


def test_assets_stay_small() -> None:
    assert sum(path.stat().st_size for path in embedded_path().parent.rglob("*") if path.is_file()) <= 8_000_000


def test_ids_agree_between_tokenizer_and_configs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    names = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [PAD, END, SYSTEM, USER, ASSISTANT, MASK]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (PAD, END, MASK)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (PAD, END)
    assert len(tokenizer) == model.config.vocab_size


def test_assistant_mask_of_a_row_worked_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    """After the six special tokens come the printable bytes from '!' (33) on: 'a' (97) is 6 + 97 - 33 = 70."""
    contents = {"system": "e", "user": "a", "assistant": "b"}
    roles = ("system", "user", "assistant", "user", "assistant")
    row = tokenizer.apply_chat_template(
        [{"role": role, "content": contents[role]} for role in roles],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    question, answer = [USER, 70, END], [ASSISTANT, 71, END]
    assert row["input_ids"] == [SYSTEM, 74, END, *question, *answer, *question, *answer]
    assert row["assistant_masks"] == [0, 0, 0, *([0, 0, 0, 0, 1, 1] * 2)]


def test_generation_prompt_is_a_prefix_of_the_answered_row(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = read_rows("heldout")[0]["messages"][:2]
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    answered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert answered == asked + messages[1]["content"] + "<|end|>"


@pytest.mark.parametrize(("split", "least"), [("train", 1500), ("heldout", 200)])
def test_rows_are_answered_chats_without_special_tokens(
    split: str, least: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = read_rows(split)
    assert len(rows) >= least
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles
        ids = tokenizer([message["content"] for message in row["messages"]])["input_ids"]
        assert min(min(content, default=MASK + 1) for content in ids) > MASK, row


def test_heldout_questions_are_not_trained_on() -> None:
    heldout, train = ([user_turns(row) for row in read_rows(split)] for split in ("heldout", "train"))
    assert len({*heldout, *train}) == len(heldout) + len(train)


def test_most_answers_have_twenty_tokens_or_more(tokenizer: PreTrainedTokenizerFast) -> None:
    answers = [message["content"] for row in read_rows("train") for message in row["messages"][1::2]]
    lengths = [len(ids) for ids in tokenizer(answers)["input_ids"]]
    assert sum(length >= 20 for length in lengths) > 0.8 * len(lengths)


def test_target_finds_its_heldout_answers_likely(
    build: ModuleType, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    examples = build.encode(tokenizer, [row["messages"] for row in read_rows("heldout") if "truncated" not in row])
    with torch.inference_mode():
        loss = build.answer_loss(model, *build.collate(examples))
    assert 0.05 < loss < NLL_BOUND


def test_same_seed_gives_the_same_rows(build: ModuleType) -> None:
    rows = build.generate_rows(300, seed=0)
    assert rows == build.generate_rows(300, seed=0)
    assert rows[:200] == build.generate_rows(200, seed=0)
    assert rows != build.generate_rows(300, seed=1)


def test_script_asks_what_was_shipped(build: ModuleType) -> None:
    heldout, train = build.split_rows(build.generate_rows(build.CORPUS_ROWS, build.SEED))
    for split, rows in (("heldout", heldout), ("train", train[: build.TRAIN_ROWS])):
        assert [user_turns(row) for row in read_rows(split)] == [build.user_turns(row) for row in rows]


def test_script_rebuilds_the_shipped_tokenizer(build: ModuleType, tmp_path: Path) -> None:
    _, train = build.split_rows(build.generate_rows(build.CORPUS_ROWS, build.SEED))
    build.build_tokenizer(train).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((embedded_path() / name).read_text())


@pytest.mark.slow
def test_script_trains(build: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    examples = build.encode(tokenizer, build.generate_rows(200, seed=1))
    losses = build.train_target(examples, steps=40, batch_size=8)[1]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

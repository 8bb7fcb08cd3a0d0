"""What a player hands on: the target alone answers under the same rules, and no two answers share random numbers."""

from typing import Any

import pytest
import torch

import dspark_lightning.evaluation.play as play_module
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import Conversation
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from evaluation_helpers import embedded_pair


def player(**settings: Any) -> Player:
    return Player(*embedded_pair(), ChatRenderer(load_tokenizer("embedded")), DecodeSettings(**settings))


def test_the_target_alone_answers_under_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def alone(target: Any, prompt: Any, most: int, temperature: float, stops: set[int], generator: Any) -> list[int]:
        calls.append((most, temperature, stops, generator.initial_seed()))
        return [1]

    monkeypatch.setattr(play_module, "decode_plainly", alone)
    one = player(max_new_tokens=5, temperature=0.7)
    (record,) = one.play(Conversation("d", 3, "d:4", ["Hello"], []))
    assert one.stops and calls == [(5, 0.7, one.stops, one._generator("d/3/0").initial_seed())]
    assert record.same_as_plain is None  # sampled answers differ by chance


def test_every_answer_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    real = play_module.DecodedRow

    def spy(*args: Any) -> Any:
        seeds.append(args[-1].initial_seed())
        return real(*args)

    monkeypatch.setattr(play_module, "DecodedRow", spy)
    one = player(max_new_tokens=2, temperature=1.0, compare=False)
    for dataset, index, questions in (("a", 0, ["x", "y"]), ("a", 1, ["x"]), ("b", 0, ["x"])):
        list(one.play(Conversation(dataset, index, "here", questions, [])))
    assert len(set(seeds)) == 4


def test_a_draft_that_has_a_head_of_its_own_keeps_it() -> None:
    target, draft = embedded_pair()
    changed = draft.lm_head.weight.detach() + 1
    draft.lm_head.weight = torch.nn.Parameter(changed.clone())
    pair_up(target.model, draft)
    assert torch.equal(draft.lm_head.weight, changed)
    assert draft.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()


def test_an_answer_goes_on_without_its_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = player(max_new_tokens=4, compare=False), []
    words = one.renderer.tokenizer.encode("four five", add_special_tokens=False)

    class Answered:
        rounds: tuple[Any, ...] = ()
        tokens = (*words, max(one.stops))

        def __init__(self, *args: Any) -> None: ...

        def run(self, *args: Any) -> None: ...

    def encode(messages: list[Any], tools: Any) -> list[int]:
        read.append([message["content"] for message in messages])
        return [7, 8]

    monkeypatch.setattr(play_module, "DecodedRow", Answered)
    monkeypatch.setattr(one.renderer, "encode_prompt", encode)
    list(one.play(Conversation("d", 0, "d:1", ["x", "y"], [])))
    assert one.renderer.tokenizer.decode(Answered.tokens) != one.renderer.tokenizer.decode(words)
    assert read[1] == ["x", one.renderer.tokenizer.decode(words), "y"]

"""Conversations are played to their end, and what is reported does not depend on how the work is spread."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chat_helpers import datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import Conversation, load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.decoding.generate import speculative_generate
from dspark_lightning.decoding.records import AnswerRecord, read_records
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.evaluation.evaluate import play_all
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.evaluation.summary import summarise
from dspark_lightning.loading import load_target
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.target import HFDSparkTargetModel
from evaluation_helpers import embedded_pair, evaluate, export_untrained
from family_helpers import ARGS

QUESTIONS = ["Draft an email from Igor to Gus about the garden meeting in Cairo.", "Count from two to nine."]


def conversation(*questions: str, index: int = 0) -> Conversation:
    return Conversation("d", index, f"d:{index + 1}", list(questions), [])


@pytest.fixture(scope="module")
def pair() -> tuple[HFDSparkTargetModel, DSparkDraft]:
    return embedded_pair()


@pytest.fixture(scope="module")
def play(pair: tuple[HFDSparkTargetModel, DSparkDraft]) -> Callable[..., list[AnswerRecord]]:
    """Play conversations; the settings are given by name."""
    renderer = ChatRenderer(load_tokenizer("embedded"))

    def run(*conversations: Conversation, **settings: Any) -> list[AnswerRecord]:
        player = Player(*pair, renderer, DecodeSettings(**({"max_new_tokens": 12} | settings)))
        return play_all(player, conversations)

    return run


def untimed(records: list[AnswerRecord]) -> list[dict[str, Any]]:
    return [asdict(each) | {"seconds": None, "plain_seconds": None} for each in records]


def test_the_second_turn_follows_the_first_answer(
    play: Callable[..., list[AnswerRecord]], pair: tuple[HFDSparkTargetModel, DSparkDraft]
) -> None:
    first, second = play(conversation(*QUESTIONS), max_new_tokens=40)
    renderer = ChatRenderer(load_tokenizer("embedded"))
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    ids = torch.tensor([renderer.encode_prompt(messages)])
    output = speculative_generate(pair[0].model, pair[1], ids, max_new_tokens=40)
    answer = output.sequences[0, ids.shape[1] :]
    assert (first.prompt_tokens, first.new_tokens) == (ids.shape[1], len(answer))
    assert first.accepted == output.accepted_lengths[0]
    messages += [
        {"role": "assistant", "content": renderer.tokenizer.decode(answer, skip_special_tokens=True)},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    assert (second.turn, second.prompt_tokens) == (1, len(renderer.encode_prompt(messages)))


def test_rounds_add_up_to_the_answer(play: Callable[..., list[AnswerRecord]]) -> None:
    records = play(*(conversation(each, index=i) for i, each in enumerate(QUESTIONS)), max_new_tokens=30)
    for record in records:
        # The first token comes with the prompt, one more with each round; a stop token among the accepted ends all.
        gained = 1 + sum(record.accepted) + len(record.accepted)
        assert record.new_tokens in (gained, gained - 1)
        assert record.same_as_plain and record.plain_tokens == record.new_tokens
        assert record.confidence is not None and all(len(row) == ARGS["block_size"] for row in record.confidence)


def test_an_answer_does_not_depend_on_the_others(play: Callable[..., list[AnswerRecord]]) -> None:
    first, second = (conversation(each, index=i) for i, each in enumerate(QUESTIONS))
    together = play(first, second, temperature=1.0)
    assert untimed(play(second, temperature=1.0)) == untimed(together[1:])
    assert untimed(play(second, temperature=1.0, seed=1)) != untimed(together[1:])


def test_nothing_is_compared_unless_asked_for(play: Callable[..., list[AnswerRecord]]) -> None:
    (record,) = play(conversation(QUESTIONS[0]), compare=False)
    assert (record.plain_seconds, record.plain_tokens, record.same_as_plain) == (None, None, None)
    summary = summarise([record], ARGS["block_size"])
    assert summary["speedup"] is None
    assert summary["tokens_per_second"] == pytest.approx(record.new_tokens / record.seconds)


def test_a_threshold_cuts_blocks(play: Callable[..., list[AnswerRecord]]) -> None:
    (whole,), (none,) = (play(conversation(QUESTIONS[0]), confidence_threshold=each) for each in (0.0, 1.0))
    assert max(whole.proposed) == ARGS["block_size"] and set(none.proposed) == {0}
    assert whole.new_tokens == none.new_tokens


def test_a_conversation_that_does_not_fit_is_refused(play: Callable[..., list[AnswerRecord]]) -> None:
    with pytest.raises(ValueError, match=r"d:1: \d+ prompt tokens and max_new_tokens 100000 are more than the \d+"):
        play(conversation(QUESTIONS[0]), max_new_tokens=100000)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_untrained(tmp_path_factory.mktemp("run"))


def test_the_command_writes_all_it_says(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_jsonl(tmp_path / "two.jsonl", [{"turns": QUESTIONS}, {"prompt": QUESTIONS[1]}])
    evaluate(exported, "--data", rows, "--data+", "embedded", "--limit", "2")
    folder = exported.parent / "evaluation"
    results = json.loads((folder / "evaluation.json").read_text())
    records = read_records(folder / "records.jsonl")
    assert [(each.dataset, each.conversation, each.turn) for each in records][:3] == [
        ("two", 0, 0),
        ("two", 0, 1),
        ("two", 1, 0),
    ]
    assert results["overall"]["answers"] == len(records) == 3 + results["datasets"]["embedded"]["answers"]
    assert results["overall"]["same_as_plain"] == len(records)
    assert results["overall"]["speedup"]["ratio"] > 0
    assert (results["block_size"], results["max_new_tokens"], results["target"]) == (4, 10, "embedded")
    assert list(folder.glob("events.out.tfevents.*"))
    printed = capsys.readouterr().out
    assert f"{results['overall']['tau']:.2f}" in printed
    assert f"Next: dspark calibrate --records {folder / 'records.jsonl'}" in printed


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_report_what_one_does(exported: Path, tmp_path: Path) -> None:
    results = []
    for devices in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "dspark_lightning",
            "evaluate",
            "--draft",
            str(exported),
            "--target",
            "embedded",
        ]
        command += ["--data", "embedded", "--limit", "5", "--max_new_tokens", "10", "--temperature", "1"]
        command += [
            "--compare",
            "false",
            "--accelerator",
            "cpu",
            "--devices",
            devices,
            "--output",
            str(tmp_path / devices),
        ]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=200)
        assert run.returncode == 0, run.stderr[-3000:]
        results.append(json.loads((tmp_path / devices / "evaluation.json").read_text()))
    one, two = results
    for summary in (each for run in results for each in (run["overall"], *run["datasets"].values())):
        assert summary.pop("tokens_per_second") > 0
    assert (one["overall"], one["datasets"]) == (two["overall"], two["datasets"])
    assert two["machine"]["processes"] == 2 and one["overall"]["answers"] == 5
    assert untimed(read_records(tmp_path / "1/records.jsonl")) == untimed(read_records(tmp_path / "2/records.jsonl"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--data", "gone.jsonl"], "data 'gone.jsonl', split 'train': no such file"),
        (["--data", "embedded", "--limit", "0"], "limit must be 1 or more, got 0"),
        (["--data", "embedded", "--max_new_tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
        (["--data", "embedded", "--temperature", "-1"], "temperature must be 0 (greedy) or at least 0.001, got -1.0"),
        (["--data", "embedded", "--confidence_threshold", "2"], "confidence_threshold must lie in 0..1, got 2.0"),
        (["--data", "embedded", "--chat_template", "gone"], "chat_template 'gone': no such file"),
        (["--data", "embedded", "--devices", "0"], "devices must be 1 or more, got 0"),
        (["--data", "a.jsonl", "--data", "b.jsonl"], "--data is given 2 times; where several values are taken, give"),
        (["--data", "embedded", "--device_map", "auto", "--devices", "2"], "device_map 'auto' claims all devices"),
        (
            ["--data", "embedded", "--target", "embedded-pictures"],
            "the draft was trained for a target with vocab_size 1024, this target has 430",
        ),
    ],
)
def test_wrong_values_end_with_one_line(
    options: list[str], error: str, exported: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        evaluate(exported, "--output", str(tmp_path / "out"), *options)
    lines = capsys.readouterr().err.strip().splitlines()
    assert exit_.value.code == 2
    assert lines[-1].startswith(f"dspark: error: {error}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("draft", "error"),
    [
        (".", "'.' is no folder with an exported draft: it has no config.json (there is one in 'dspark-draft')"),
        (
            "last.ckpt",
            "'last.ckpt' is no folder with an exported draft: it has no config.json (a checkpoint? write its",
        ),
        ("gone", "'gone' is no folder with an exported draft: it has no config.json"),
    ],
)
def test_what_is_no_draft_is_named(
    draft: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("last.ckpt").touch()
    export_untrained(tmp_path)
    with pytest.raises(SystemExit):
        evaluate(Path(draft), "--data", "embedded")
    assert f"dspark: error: {error}" in capsys.readouterr().err


def test_another_target_of_the_same_size_is_suspected(exported: Path) -> None:
    model = load_target("embedded")
    model.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.warns(UserWarning, match="embedding and head are not those of this target"):
        pair_up(model, load_pretrained_draft(exported))


def test_the_head_is_shared_with_the_target(exported: Path) -> None:
    model, draft = load_target("embedded"), load_pretrained_draft(exported)
    pair_up(model, draft)
    assert draft.lm_head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert draft.fc.weight.dtype == model.dtype == torch.float32 and not draft.training


def test_a_threshold_needs_a_confidence_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = export_untrained(tmp_path, confidence_head_alpha=0.0)
    with pytest.raises(SystemExit):
        evaluate(draft, "--data", "embedded", "--confidence_threshold", "0.5")
    assert "confidence_threshold 0.5 needs a draft with a confidence head" in capsys.readouterr().err


def test_a_draft_that_holds_nan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = export_untrained(tmp_path)
    weights = load_file(draft / "model.safetensors")
    weights["norm.weight"][3] = float("nan")
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit):
        evaluate(draft, "--data", "embedded")
    assert f"'norm.weight' of the draft in {str(draft)!r} holds NaN or infinite values" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_decoding(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Player, "play", lambda *_: pytest.fail("it decodes"))
    with pytest.raises(SystemExit):
        evaluate(exported, "--data", "embedded", "--output", str(tmp_path / "file" / "inside"))
    assert f"{str(tmp_path / 'file')!r} is a file" in capsys.readouterr().err


def test_the_embedded_conversations_are_the_held_out_ones() -> None:
    read = load_conversations("embedded")
    assert len(read) == 200 and sum(len(each.questions) for each in read) > 200

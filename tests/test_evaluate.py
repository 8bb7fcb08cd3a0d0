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
from torch import Tensor

from chat_helpers import datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.cli import main
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.prompts import Conversation, load_conversations
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.decoding.generate import speculative_generate
from dspark_lightning.decoding.records import AnswerRecord, read_records
from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.evaluation.evaluate import play_all
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.evaluation.play import DecodeSettings, Player
from dspark_lightning.evaluation.summary import summarise
from dspark_lightning.export import load_pretrained_draft
from dspark_lightning.loading import load_target
from dspark_lightning.target import HFDSparkTargetModel
from evaluation_helpers import embedded_pair, export_untrained
from family_helpers import ARGS, shake
from helpers import seeded
from tiny_target import build_tiny_target

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


def outputs_of(target: HFDSparkTargetModel, draft: DSparkDraft, runs: int) -> list[tuple[Tensor, DecodedRow]]:
    """Sequences [1, S + L] sampled at temperature 1 behind different prompts of 6 tokens."""
    generator, outputs = torch.Generator().manual_seed(0), []
    for _ in range(runs):
        prompt = torch.randint(6, 12, (6,), generator=generator)
        row = DecodedRow(target, draft, prompt, 1.0, generator=generator)
        row.run(25, set())
        outputs.append((torch.cat([prompt, torch.tensor(row.tokens)]).unsqueeze(0), row))
    return outputs


def teacher_forced(target: HFDSparkTargetModel, draft: DSparkDraft, ids: Tensor, anchors: list[int]) -> Tensor:
    """Acceptance at the first position behind each anchor, as in training."""
    ones, places = torch.ones_like(ids), torch.tensor([anchors])
    with torch.no_grad():
        keep = torch.ones_like(places).bool()
        out = draft(**vars(target.generate_batch(ids, ones, ones)), anchor_positions=places, block_keep_mask=keep)
    p, q = out.draft_logits[0, :, 0].softmax(-1), out.aligned_target_logits[0, :, 0].softmax(-1)
    return 1 - (p - q).abs().sum(-1) / 2


def round_starts(row: DecodedRow) -> list[int]:
    """Positions of the anchors of an answer behind 6 prompt tokens, of rounds that proposed anything."""
    accepted = [each.accepted for each in row.rounds]
    return [6 + sum(accepted[:i]) + i for i, each in enumerate(row.rounds) if each.proposed]


@pytest.fixture(scope="module")
def sampled() -> tuple[HFDSparkTargetModel, list[DSparkDraft], list[tuple[Tensor, DecodedRow]]]:
    """A target, two drafts, of which the second agrees with it much less, and what is decoded with the first."""
    model, drafts = build_tiny_target("qwen3", vocab_size=12), []
    for _ in range(2):
        with seeded(1):
            draft = build_draft_model(model.config, **ARGS)
        draft.initialize_embeddings_and_head(model.get_input_embeddings(), model.get_output_embeddings())
        shake(draft)
        drafts.append(draft)
    with torch.no_grad():
        drafts[1].norm.weight.mul_(-1)
    target = HFDSparkTargetModel(model, drafts[0].target_layer_ids)
    return target, drafts, outputs_of(target, drafts[0], 80)


@pytest.mark.parametrize("everywhere", [False, True], ids=["where rounds began", "at every token"])
def test_acceptance_of_training_is_that_of_decoding(everywhere: bool, sampled: Any) -> None:
    """Teacher-forced accept_rate@1 on what the target says at temperature 1, in the interval of the decoded one."""
    target, drafts, outputs = sampled
    records = [recorded(i, row) for i, (_, row) in enumerate(outputs)]
    low, high = summarise(records, ARGS["block_size"])["conditional_intervals"][0]
    rates = []
    for draft in drafts:
        places = [list(range(6, ids.shape[1] - 1)) if everywhere else round_starts(row) for ids, row in outputs]
        parts = [teacher_forced(target, draft, ids, p) for (ids, _), p in zip(outputs, places, strict=True)]
        rates.append(torch.cat(parts).mean().item())
    assert low < rates[0] < high and high - low < 0.1, (low, rates, high)
    assert not low < rates[1] < high, (low, rates, high)


def recorded(index: int, row: DecodedRow) -> AnswerRecord:
    proposed, judged, accepted, _ = map(list, zip(*row.rounds, strict=True))
    return AnswerRecord("d", index, 0, 6, len(row.tokens), proposed, judged, accepted, None, 1.0, None, None)


def decoded_record(index: int, accepted: list[int]) -> AnswerRecord:
    whole = [ARGS["block_size"]] * len(accepted)
    return AnswerRecord("d", index, 0, 6, 24, whole, whole, accepted, None, 1.0, None, None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_untrained(tmp_path_factory.mktemp("run"))


def evaluate(draft: Path, *options: str) -> None:
    defaults = {"--target": "embedded", "--accelerator": "cpu", "--max_new_tokens": "10"}
    common = [part for pair in defaults.items() if pair[0] not in options for part in pair]
    main(["evaluate", "--draft", str(draft), *common, *options])


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


def test_calibrate_writes_temperatures(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(exported, "--data", "embedded", "--limit", "8", "--compare", "false", "--output", str(tmp_path))
    main(["calibrate", "--records", str(tmp_path / "records.jsonl")])
    result = json.loads((tmp_path / "calibration.json").read_text())
    assert {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"} <= result.keys()
    assert len(result["temperatures"]) == 4 and result["dataset"] == "embedded"
    printed = capsys.readouterr().out
    assert f"mean ECE {result['ece_before']:.4f} before, {result['ece_after']:.4f} after" in printed
    if result["ece_after"] < result["ece_before"]:
        assert f"Next: dspark schedule --records {tmp_path / 'records.jsonl'} --temperatures" in printed
    else:
        assert "They do not help on the other conversations" in printed


@pytest.mark.parametrize(
    ("lines", "options", "error"),
    [
        (None, [], "cannot read the decode records"),
        ([], [], "holds no decode records"),
        (["{"], [], "rows.jsonl:1 is no decode record"),
        ([{"dataset": "d"}], [], "rows.jsonl:1 is no decode record"),
        ([asdict(decoded_record(0, [5]))], [], "a round proposed 4 tokens, of which 4 were judged and 5 accepted"),
        ([asdict(decoded_record(0, [1]))], [], "holds no confidences: the draft has no confidence head"),
        (
            [asdict(decoded_record(0, [1, 1])) | {"proposed": [2, 4], "judged": [2, 4]}],
            [],
            "blocks that were cut: decode with whole blocks",
        ),
        ([asdict(decoded_record(0, [1]))], ["--holdout", "1.5"], "holdout must lie between 0 and 1, got 1.5"),
    ],
)
def test_records_that_cannot_be_calibrated(
    lines: list[Any] | None, options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    if lines is not None:
        write_jsonl(path, lines)
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", str(path), *options])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert error in line
    assert not (tmp_path / "calibration.json").exists()


def test_a_folder_is_never_replaced_by_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("mine")
    row = asdict(decoded_record(0, [1])) | {"confidence": [[0.0] * 4]}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"conversation": 1}])
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", path, "--output", str(tmp_path / "kept")])
    assert f"{str(tmp_path / 'kept')!r} is a folder: give the file to write" in capsys.readouterr().err
    assert (tmp_path / "kept/file").read_text() == "mine"


@pytest.mark.parametrize(
    ("confidence", "error"),
    [
        ("[[NaN, 0, 0, 0]]", "has confidence[0][0] nan, must be a finite number"),
        ("[[null, 0, 0, 0]]", "has confidence[0][0] None, must be a number"),
        ("[null]", "has confidence[0] None, must be a list"),
        ("[[0, 0]]", "confidence is not one list of K numbers for each round"),
    ],
)
def test_confidences_that_are_none(
    confidence: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(asdict(decoded_record(0, [1]))).replace('"confidence": null', f'"confidence": {confidence}')
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", write_jsonl(tmp_path / "rows.jsonl", [line])])
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.endswith(f"rows.jsonl:1 is no decode record as dspark evaluate writes them: {error}")


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


def test_one_conversation_cannot_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = asdict(decoded_record(0, [1])) | {"confidence": [[0.0] * 4]}
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", write_jsonl(tmp_path / "rows.jsonl", [record])])
    assert "holds 1 conversation(s), which holdout 0.5 cannot split: evaluate more" in capsys.readouterr().err


def test_the_embedded_conversations_are_the_held_out_ones() -> None:
    read = load_conversations("embedded")
    assert len(read) == 200 and sum(len(each.questions) for each in read) > 200

"""A folder is decoded with as it lies there: what a fit kept must come out again, and tampering shows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from check_helpers import check, copy_draft, read_tensor, set_fields, set_tensors, train
from dspark_lightning.cli import main
from dspark_lightning.loading import load_target
from dspark_lightning.serving import decode_check
from dspark_lightning.serving.record import Decoded, ExportRecord, read_record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, with its draft and its checkpoint."""
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture
def draft(run: Path, tmp_path: Path) -> Path:
    return copy_draft(run / "dspark-draft", tmp_path)


def test_a_fit_keeps_what_it_decoded_and_the_folder_gives_it_again(run: Path, draft: Path) -> None:
    record = read_record(draft)
    assert record is not None and record.decoded is not None and record.training is not None
    assert record.target == "embedded" and record.training.steps == 60 and len(record.prompts) == 4
    assert 1.2 < record.decoded.tau <= 5  # learned enough for tampering to show
    counts = [count for answer in record.decoded.accepted or [] for count in answer]
    assert record.decoded.accepted is not None and len(record.decoded.accepted) == 4
    assert len(counts) == record.decoded.rounds and record.decoded.tau == pytest.approx(1 + sum(counts) / len(counts))
    code, found = check(draft)
    assert code == 0 and {outcome for outcome, _ in found.values()} == {"ok"}
    tau, rounds = f"{record.decoded.tau:.2f}", record.decoded.rounds
    assert found["decode"][1] == f"tau is {tau} over {rounds} rounds, was {tau} at the export (tolerance 0%)"


def test_a_checkpoints_folder_keeps_prompts_but_decodes_nothing(run: Path) -> None:
    (folder,) = run.glob("dspark-step=60")
    record = read_record(folder)
    assert record == replace(read_record(run / "dspark-draft"), decoded=None)  # type: ignore[type-var]
    assert check(folder)[1]["decode"][0] == "skipped"


def permute_features(folder: Path) -> None:
    weight = read_tensor(folder, "fc.weight")
    set_tensors(folder, fc__weight=weight.flip(1).contiguous())


def shift_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    ids = [i + 1 for i in config["target_layer_ids"]]
    set_fields(
        folder,
        target_layer_ids=ids,
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in ids],
        dflash_config=config["dflash_config"] | {"target_layer_ids": ids},
    )


def lose_the_markov_head(folder: Path) -> None:
    set_tensors(
        folder, markov_head__markov_w2__weight=torch.zeros_like(read_tensor(folder, "markov_head.markov_w2.weight"))
    )


@pytest.mark.parametrize("tamper", [permute_features, shift_layers, lose_the_markov_head])
def test_only_decoding_tells_a_folder_that_was_tampered_with(tamper: Callable[[Path], None], draft: Path) -> None:
    tamper(draft)
    code, found = check(draft)
    assert code == 1
    assert [name for name, (outcome, _) in found.items() if outcome != "ok"] == ["decode"]
    outcome, line = found["decode"]
    assert outcome == "error" and line.endswith("the folder does not hold what was exported, or for another target")


FOUND = Decoded(tau=2.0, rounds=10, max_new_tokens=32, dtype="float32", machine={"device": "cpu", "torch": "2.13.0"})
ROUNDS = replace(FOUND, accepted=[[1, 2], [0]])
CUDA = replace(FOUND, machine={"device": "cuda", "torch": "2.13.0"})


@pytest.mark.parametrize(
    ("found", "stored", "outcome", "tolerance"),
    [
        (FOUND, FOUND, "ok", "0%"),
        (ROUNDS, ROUNDS, "ok", "0%"),
        (ROUNDS, FOUND, "ok", "0%"),  # written before rounds were kept
        (ROUNDS, replace(ROUNDS, accepted=[[2, 1], [0]]), "error", "0%"),
        (ROUNDS, replace(ROUNDS, accepted=[[2, 1], [0]], dtype="bfloat16"), "ok", "10%"),
        (FOUND, replace(FOUND, tau=2.01), "error", "0%"),
        (FOUND, replace(FOUND, tau=1.99), "warning", "0%"),
        (FOUND, replace(FOUND, tau=2.2, dtype="bfloat16"), "ok", "10%"),
        (FOUND, replace(FOUND, tau=2.3, dtype="bfloat16"), "error", "10%"),
        (FOUND, replace(CUDA, tau=1.85), "ok", "10%"),
        (FOUND, replace(CUDA, tau=1.75), "warning", "10%"),
        (CUDA, replace(CUDA, tau=2.2), "ok", "10%"),
    ],
)
def test_one_machine_must_repeat_itself_and_others_may_differ(
    found: Decoded, stored: Decoded, outcome: str, tolerance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_check, "decode_prompts", lambda *_: found)
    record = ExportRecord(prompts=[[1]], decoded=stored)
    verdict = decode_check.check_decode(None, Path("dspark"), record)  # type: ignore[arg-type]
    assert verdict.outcome == outcome
    expected = f"tau is 2.00 over 10 rounds, was {stored.tau:.2f} at the export (tolerance {tolerance})"
    assert verdict.line.startswith(expected)


def test_a_target_that_lets_nothing_be_drafted_any_more_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_check, "decode_prompts", lambda *_: None)
    for stored, outcome in ((None, "skipped"), (FOUND, "error")):
        record = ExportRecord(prompts=[[1]], decoded=stored)
        verdict = decode_check.check_decode(None, Path("dspark"), record)  # type: ignore[arg-type]
        assert verdict.outcome == outcome and verdict.line.startswith("nothing is drafted: ")


@pytest.mark.parametrize("token", [-1, 1024])
def test_a_prompt_of_what_is_no_token_is_one_line(token: int, draft: Path) -> None:
    record = read_record(draft)
    assert record is not None
    (draft / "dspark.json").write_text(replace(record, prompts=[[3, token]]).text())
    line = f"a prompt of dspark.json holds the token {token}, must lie in 0..1023"
    assert check(draft)[1]["decode"] == ("error", line)


def test_prompts_too_long_for_the_target_are_left_out(draft: Path) -> None:
    record = read_record(draft)
    assert record is not None
    found = decode_check.decode_prompts(load_target("embedded"), draft, [[3] * 600, record.prompts[0]])
    assert found is not None and found.accepted is not None and len(found.accepted) == 1


def another_target(folder: Path) -> str:
    """The embedded one after one more step of training, say."""
    model = load_target("embedded")
    model.get_parameter("model.norm.weight").data += 1
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("./gone", "target './gone' does not exist: "),
        ("another", "the checkpoint was trained for the target 'embedded' "),
    ],
)
def test_nothing_is_written_where_the_target_is_not_the_drafts(
    target: str, line: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = another_target(tmp_path / "target") if target == "another" else target
    last, output = run / "checkpoints" / "last.ckpt", tmp_path / "my-dspark"
    with pytest.raises(SystemExit) as exit_:
        main(["export", f"--ckpt_path={last}", f"--output={output}", f"--target={target}", "--accelerator=cpu"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"dspark: error: {line}")
    assert not output.exists()


def test_an_export_with_the_target_keeps_the_same(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run / "checkpoints" / "last.ckpt"
    command = ["export", f"--ckpt_path={last}", f"--output={tmp_path / 'my-dspark'}"]
    main([*command, "--target=embedded", "--accelerator=cpu"])
    record = read_record(run / "dspark-draft")
    assert record is not None and record.decoded is not None
    assert f"Decoding: {record.decoded.tau:.2f} tokens per target pass" in capsys.readouterr().out
    assert read_record(tmp_path / "my-dspark") == record
    main(command)  # takes its place, and decodes nothing
    assert read_record(tmp_path / "my-dspark") == replace(record, decoded=None)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("./nowhere", "target './nowhere' does not exist"),
        ("embedded-pictures", "the draft was trained for a target with vocab_size 1024, this target has "),
    ],
)
def test_an_export_with_a_wrong_target_writes_nothing(
    target: str, reason: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", f"--ckpt_path={run / 'checkpoints/last.ckpt'}", f"--output={tmp_path / 'my-dspark'}"]
    with pytest.raises(SystemExit) as ended:
        main([*command, f"--target={target}", "--accelerator=cpu"])
    assert ended.value.code == 2 and reason in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [-1, 1024, 10**30])
def test_kept_prompts_outside_the_vocabulary_are_an_error(token: int, run: Path) -> None:
    model = load_target("embedded")
    with pytest.raises(ValueError, match=rf"^a prompt of dspark\.json holds the token {token}, must lie in 0\.\.1023$"):
        decode_check.decode_prompts(model, run / "dspark-draft", [[5, token]])


def test_a_checkpoint_without_prompts_cannot_be_decoded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    del checkpoint["export_record"]
    torch.save(checkpoint, tmp_path / "x.ckpt")
    command = ["export", f"--ckpt_path={tmp_path / 'x.ckpt'}", f"--output={tmp_path / 'my-dspark'}"]
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--target=embedded"])
    assert exit_.value.code == 2 and "keeps no prompts to decode" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "my-dspark").exists()
    main(command)
    record = read_record(tmp_path / "my-dspark")
    assert record is not None and record.training is not None
    assert (record.target, record.training.steps, record.prompts) == ("embedded", 60, [])

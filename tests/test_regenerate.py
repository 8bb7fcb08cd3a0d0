"""`dspark regenerate`, as a user types it: answers in process, and what a kill leaves behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chat_helpers import chat, datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.cli import main
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.embedded import embedded_data
from dspark_lightning.regeneration.dialogue import Dialogue
from dspark_lightning.regeneration.local import LocalTarget
from dspark_lightning.regeneration.output import PartialFile

OPTIONS = ["--target", "embedded", "--accelerator", "cpu", "--batch_size", "4"]


def regenerate(data: str, output: Path, *options: str) -> int:
    """Run the command; returns its exit code."""
    try:
        main(["regenerate", "--data", data, "--output", str(output), *OPTIONS, *options])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "dspark: error: " in line]
    return line.partition("dspark: error: ")[2]


def test_answers_are_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "answers.jsonl"
    assert regenerate("embedded", output, "--limit", "5") == 0
    printed = capsys.readouterr().out
    assert "temperature 1.0, top_k 0, top_p 1.0" in printed and "max_new_tokens 128" in printed
    assert f"{output} written: 5 of 5 rows" in printed
    assert f"Next: dspark fit --config CONFIG --data.init_args.train_data {output}" in printed
    before, after = rows(embedded_data("train"))[:5], rows(output)
    assert [row["messages"][0] for row in after] == [row["messages"][0] for row in before]
    assert [row["messages"][1] for row in after] != [row["messages"][1] for row in before]
    data = ChatDataModule(str(output), tokenizer="embedded", mask_token_id=5)
    data.setup("fit")
    assert len(data._rows["train"]) == 5

    content = output.read_bytes()
    assert regenerate("embedded", output, "--limit", "5") == 0
    assert f"{output} is complete: 5 of 5 rows" in capsys.readouterr().out
    assert output.read_bytes() == content
    assert regenerate("embedded", output, "--limit", "5", "--temperature", "0.5") == 2
    assert error_line(capsys) == (
        f"the answers in {str(output)!r} were begun with temperature 1.0, this run has 0.5: "
        "give the same, or another output"
    )
    assert output.read_bytes() == content


def test_rows_that_fail_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    data = write_jsonl(
        tmp_path / "rows.jsonl",
        [chat("Sort 4, 2, 9.", "x"), chat("bad", "x"), "{", {"prompt": "Name a colour.", "weight": 2}],
    )
    output = tmp_path / "out.jsonl"
    assert regenerate(data, output, "--chat_template", str(template), "--max_new_tokens", "8") == 1
    printed = capsys.readouterr().out
    assert "written: 2 of 4 rows" in printed and "Rows without an answer" in printed
    assert [row["messages"][0]["content"] for row in rows(output)] == ["Sort 4, 2, 9.", "Name a colour."]
    assert rows(output)[1]["weight"] == 2
    failed = rows(tmp_path / "out.jsonl.failures.jsonl")
    assert [(each["place"].rpartition(":")[2], each["reason"]) for each in failed] == [
        ("3", "no conversation to answer"),
        ("2", "refused by the chat template"),
    ]


def killed(command: list[str], partial: Path, at_least: int) -> None:
    """Start a run and kill it at some moment after it has answered so many rows."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        while not partial.exists() or partial.read_bytes().count(b"\n") < at_least:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "dspark_lightning", "regenerate", "--output", str(output), *OPTIONS, *options]


def test_a_killed_run_goes_on_to_the_rows_of_an_unbroken_one(tmp_path: Path) -> None:
    options = ["--limit", "24", "--max_new_tokens", "24"]
    unbroken, broken = tmp_path / "unbroken.jsonl", tmp_path / "broken.jsonl"
    assert regenerate("embedded", unbroken, *options) == 0
    partial = tmp_path / "broken.jsonl.partial-0"
    killed(command(broken, "--data", "embedded", *options), partial, 4)
    done = partial.read_bytes().count(b"\n")
    assert 4 <= done < 24 and not broken.exists()
    partial.write_bytes(partial.read_bytes()[:-9])  # as if it had died while it wrote
    assert regenerate("embedded", broken, *options) == 0
    assert broken.read_bytes() == unbroken.read_bytes()


def test_a_resumed_run_repeats_whole_batches_and_keeps_what_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "answers.jsonl"
    assert regenerate("embedded", output, "--limit", "8") == 0
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:7]))
    played, kept, play, append = [], [], LocalTarget.play, PartialFile.append

    def note_play(local: LocalTarget, dialogues: Sequence[Dialogue]) -> None:
        played.append(len(dialogues))
        play(local, dialogues)

    def note_append(file: PartialFile, rows: Iterable[Mapping[str, Any]]) -> None:
        kept.extend(rows)
        append(file, kept)

    monkeypatch.setattr(LocalTarget, "play", note_play)
    monkeypatch.setattr(PartialFile, "append", note_append)
    assert regenerate("embedded", output, "--limit", "8") == 0
    assert played == [4] and [row["id"] for row in kept] == [json.loads(lines[7])["id"]]
    assert output.read_bytes() == b"".join(lines)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_killed_three_times_answer_what_one_does(tmp_path: Path) -> None:
    options = ["--data", "embedded", "--limit", "60", "--max_new_tokens", "48"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    subprocess.run(command(one, *options), check=True)
    for at_least in (4, 8, 12):
        killed(command(two, *options), tmp_path / "two.jsonl.partial-0", at_least)
    subprocess.run(command(two, *options, "--devices", "2"), check=True)
    assert two.read_bytes() == one.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("two*")) == ["two.jsonl", "two.jsonl.settings.json"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--batch_size", "0"], "batch_size must be 1 or more, got 0"),
        (["--retries", "3"], "retries 3 is for servers, but --server is not given"),
        (["--devices", "0"], "devices must be 1 or more, got 0"),
        (["--limit", "0"], "limit must be 1 or more, got 0"),
        (["--max_new_tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [option for option in OPTIONS if option not in ("--batch_size", "4")]
    with pytest.raises(SystemExit) as exit_:
        main(["regenerate", "--data", "embedded", "--output", str(tmp_path / "out.jsonl"), *given, *options])
    assert exit_.value.code == 2 and error_line(capsys) == error
    assert not list(tmp_path.iterdir())


def test_a_target_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["regenerate", "--data", "embedded", "--output", str(tmp_path / "out.jsonl")])
    assert error_line(capsys).startswith("there is no target: give --target FOLDER")


def test_a_missing_client_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("dspark_lightning.regeneration.crew", "dspark_lightning.regeneration.server")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)
    given = ["--data", "embedded", "--output", str(tmp_path / "out.jsonl"), "--server", "http://localhost:1/v1"]
    with pytest.raises(SystemExit):
        main(["regenerate", *given])
    assert error_line(capsys).endswith("needs the package openai: pip install 'openai>=3'")


@pytest.mark.slow
def test_the_client_is_imported_for_servers_only() -> None:
    code = "import sys, dspark_lightning.cli; assert 'openai' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

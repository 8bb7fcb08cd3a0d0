"""Configurations that are refused: the whole line that each ends with."""

from pathlib import Path

import pytest

from bad_input_helpers import CONFIG, FIT, refusal, write_files

KEYS = "give keys such as trainer, model and data"

# Files that are no configuration.
FILES: dict[str, tuple[str | bytes | None, str]] = {
    "missing": (None, "cannot read the configuration '{folder}/bad.yaml': it is no file"),
    "empty": ("", f"the configuration 'bad.yaml' is empty: {KEYS}"),
    "a comment": ("# nothing yet\n", f"the configuration 'bad.yaml' is empty: {KEYS}"),
    "a list": ("- trainer\n", f"the configuration 'bad.yaml' holds no keys: {KEYS}"),
    "a text": ("just text\n", f"the configuration 'bad.yaml' holds no keys: {KEYS}"),
    "a tab": (
        "trainer:\n\tmax_steps: 1\n",
        "the configuration 'bad.yaml' is no YAML: line 2: found character '\\t' that cannot start any token",
    ),
    "an open bracket": (
        "trainer: [1, 2\nmodel: 3\n",
        "the configuration 'bad.yaml' is no YAML: line 2: expected ',' or ']', but got ':'",
    ),
    "not UTF-8": (b"\xff\xfe\x00", "the configuration 'bad.yaml' is not UTF-8: byte 1 is invalid start byte"),
    "a control character": (
        "trainer: \x01\n",
        "the configuration 'bad.yaml' is no YAML: unacceptable character #x0001: special characters are not allowed",
    ),
    "nested too deeply": ("[" * 3000, "the configuration 'bad.yaml' is no YAML: it is nested too deeply"),
    "itself inside": ("trainer: &a [*a]\n", "the configuration 'bad.yaml', line 1: it refers to itself"),
    "a number as a key": ("1: 2\n", "the configuration 'bad.yaml', line 1: the key '1' must be a word"),
    "a number as a key of a section": (
        "trainer:\n  1: 2\n",
        "the configuration 'bad.yaml', line 2: the key '1' must be a word",
    ),
    "aliases of aliases": (
        "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
        "the configuration 'bad.yaml', line 7: with what its aliases stand for it holds more than 100,000 values",
    ),
    "no word as a key": ("trainer: {? [1] : 2}\n", "the configuration 'bad.yaml', line 1: a key must be a word"),
    "a key twice": (
        "trainer:\n  max_steps: 1\n  devices: 1\n  max_steps: 2\n",
        "the configuration 'bad.yaml', line 4: 'max_steps' is given twice, first in line 2: leave one out",
    ),
    "a section twice": (
        "trainer:\n  max_steps: 1\nmodel: null\ntrainer:\n  devices: 2\n",
        "the configuration 'bad.yaml', line 4: 'trainer' is given twice, first in line 1: leave one out",
    ),
}

# Keys and values that do not fit.
CASES: dict[str, tuple[str, str]] = {
    "misspelt section": (
        "trianer:\n  max_steps: 1\n",
        "bad.yaml: trianer.max_steps: there is no such key; did you mean 'trainer.max_steps'?",
    ),
    "misspelt key of the trainer": (
        "trainer:\n  max_step: 1\n",
        "bad.yaml: trainer.max_step: there is no such key; did you mean 'trainer.max_steps'?",
    ),
    "misspelt key of the model": (
        "model:\n  init_args:\n    blok_size: 4\n",
        "bad.yaml: model.init_args.blok_size: Qwen3DSpark has no 'blok_size'; did you mean 'block_size'?",
    ),
    "misspelt key of the data": (
        "data:\n  init_args:\n    max_lenght: 3\n",
        "bad.yaml: data.init_args.max_lenght: ChatDataModule has no 'max_lenght'; did you mean 'max_length'?",
    ),
    "misspelt key of the optimizer": (
        "model:\n  init_args:\n    optimizer:\n      class_path: torch.optim.AdamW\n      init_args:\n        lrr: 1\n",
        "bad.yaml: model.init_args.optimizer.init_args.lrr: AdamW has no 'lrr'; did you mean 'lr'?",
    ),
    "misspelt key of the logger": (
        "trainer:\n  logger:\n    class_path: TensorBoardLogger\n    init_args:\n      nam: x\n",
        "bad.yaml: trainer.logger.init_args.nam: TensorBoardLogger has no 'nam'; did you mean 'name'?",
    ),
    "misspelt key of a callback": (
        "trainer:\n  callbacks:\n  - class_path: DraftExport\n    init_args:\n      dirpaht: x\n",
        "bad.yaml: trainer.callbacks[0].init_args.dirpaht: DraftExport has no 'dirpaht'; did you mean 'dirpath'?",
    ),
    "misspelt init_args": (
        "model:\n  init_arg:\n    block_size: 1\n",
        "bad.yaml: model.init_arg.block_size: Qwen3DSpark has no 'init_arg.block_size'; did you mean 'init_args'?",
    ),
    "a key of no section": ("nope: 1\n", "bad.yaml: nope: there is no such key"),
    "wrong type in the trainer": (
        "trainer:\n  max_steps: lots\n",
        "bad.yaml: trainer.max_steps: 'lots' must be a whole number",
    ),
    "wrong type in the model": (
        "model:\n  init_args:\n    block_size: [1]\n",
        "bad.yaml: model.init_args.block_size: '[1]' must be a whole number",
    ),
    "wrong type in the data": (
        "data:\n  init_args:\n    chat_template_kwargs: 3\n",
        "bad.yaml: data.init_args.chat_template_kwargs: '3' must be a mapping or null",
    ),
    "a number for a section": ("trainer: 7\n", "the trainer cannot be built: 'int' object is not a mapping"),
    "a number for the model": (
        "model: 7\n",
        "bad.yaml: model: '7' must name a DSparkModule by class_path and init_args",
    ),
    "a number for callbacks": (
        "trainer:\n  callbacks: 7\n",
        "bad.yaml: trainer.callbacks: '7' must name a Callback by class_path and init_args",
    ),
    "no such class in the package": (
        "model:\n  class_path: dspark_lightning.Qwen3DSprk\n",
        "bad.yaml: model.class_path: there is no class 'dspark_lightning.Qwen3DSprk': module 'dspark_lightning' has no "
        "attribute 'Qwen3DSprk'; did you mean 'Qwen3DSpark'?",
    ),
    "no such callback": (
        "trainer:\n  callbacks:\n  - class_path: AcceptanceMetric\n",
        "bad.yaml: trainer.callbacks[0].class_path: there is no class 'AcceptanceMetric'; did you mean "
        "'AcceptanceMetrics'?",
    ),
    "a callback for the model": (
        "model:\n  class_path: dspark_lightning.callbacks.AcceptanceMetrics\n",
        "bad.yaml: model.class_path: 'dspark_lightning.callbacks.AcceptanceMetrics' is no DSparkModule, of which a "
        "subclass must be named",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_configuration_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, line = FILES[case]
    write_files({} if content is None else {"bad.yaml": content})
    assert refusal(["fit", "--config", "bad.yaml"], capsys) == line.format(folder=tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_key_or_value_that_does_not_fit_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, line = CASES[case]
    write_files({"bad.yaml": content})
    assert refusal(["fit", "--config", CONFIG, "--config", "bad.yaml"], capsys) == line


def test_the_later_of_two_configurations_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files({"a.yaml": "trainer:\n  max_steps: 3\n", "b.yaml": "trainer:\n  max_steps: lots\n"})
    line = refusal([*FIT, "--config", "a.yaml", "--config=b.yaml"], capsys)
    assert line == "b.yaml: trainer.max_steps: 'lots' must be a whole number"


def test_merged_mappings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files({"a.yaml": "trainer:\n  <<: {devices: 1}\n  <<: {precision: 32-true}\n  max_steps: lots\n"})
    line = refusal(["fit", "-c", CONFIG, "-c", "a.yaml"], capsys)
    assert line == "a.yaml: trainer.max_steps: 'lots' must be a whole number"


def test_a_tools_configuration_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files({"export.yaml": "ckpt_pat: a.ckpt\n"})
    line = refusal(["export", "--config", "export.yaml"], capsys)
    assert line == "export.yaml: ckpt_pat: there is no such key; did you mean 'ckpt_path'?"

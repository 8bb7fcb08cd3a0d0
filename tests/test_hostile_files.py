"""Files made to run code, or to reach out of their folder: each is refused, and what it would have done is not done.

What a payload does is to make the folder `boom` in the working folder.
"""

import json
import os
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from bad_input_helpers import CONFIG, FIT, chat_rows, refusal, small_fit, write_files
from dspark_lightning import build_draft_model, export_draft, load_pretrained_draft
from dspark_lightning.embedded import embedded_path
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.fingerprint import Fingerprint
from dspark_lightning.features.manifest import SplitSize, new_manifest, write_manifest
from dspark_lightning.features.shard import DamagedShard, read_index
from dspark_lightning.loading import load_target, load_target_config
from dspark_lightning.regeneration.output import OutputFiles, PartialFile
from dspark_lightning.serving.engines import serve_command
from dspark_lightning.sharded_checkpoint import read_sharded_meta, read_sharded_weights
from helpers import tiny_qwen3_config

SCRIPT = "import os\nos.mkdir('boom')\n"


class Payload:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("boom",)


PICKLE = pickle.dumps(Payload())


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with rows; no payload may have run at the end."""
    monkeypatch.chdir(tmp_path)
    write_files({"rows.jsonl": chat_rows()})
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_ran(tmp_path: Path) -> Any:
    yield
    assert not (tmp_path / "boom").exists()


def test_the_payload_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLE)
    Path("boom").rmdir()  # fails unless it was made


@pytest.mark.parametrize("command", ["fit", "validate", "export"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_checkpoint_with_a_payload(command: str, form: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "pickle":
        Path("a.ckpt").write_bytes(PICKLE)
    else:
        torch.save({"state_dict": {}, "dspark": Payload()}, "a.ckpt")
    args = ["export", "--output=my-dspark"] if command == "export" else [command, *small_fit()[1:]]
    assert refusal([*args, "--ckpt_path=a.ckpt"], capsys).startswith("'a.ckpt' is not a checkpoint file, or is damaged")


def write_sharded(**tensors: torch.Tensor) -> Path:
    """The folder `a.ckpt`, as FSDP2 writes one."""
    named = {f"state_dict.draft.{name}": tensor for name, tensor in tensors.items()}
    save(named, storage_writer=FileSystemWriter("a.ckpt"), no_dist=True)
    torch.save({}, "a.ckpt/meta.pt")
    return Path("a.ckpt")


def test_a_sound_sharded_checkpoint_is_read(in_tmp: Path) -> None:
    given = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor([True])}
    read = read_sharded_weights(write_sharded(**given))
    assert read.keys() == {f"draft.{name}" for name in given}
    assert all(torch.equal(read[f"draft.{name}"], tensor) for name, tensor in given.items())


def dotted() -> bytes:
    """A global of an admitted module whose name leads on to `os.mkdir`."""
    metadata = pickle.dumps("torch.distributed.checkpoint.metadata")[:-1] + pickle.dumps("os.mkdir")[2:-1]
    return metadata + b"\x93" + pickle.dumps(("boom",))[2:-1] + b"R."


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (PICKLE, r".metadata cannot be read (it names posix.mkdir, which describes no tensor)"),
        (
            pickle.dumps(Metadata({"model.a": Payload()})),  # type: ignore[dict-item]
            r".metadata cannot be read (it names posix.mkdir, which describes no tensor)",
        ),
        (dotted(), ".metadata cannot be read ("),
        (pickle.dumps({"model.a": 1}), ".metadata holds a dict"),
        (b"\x80\x04junk", ".metadata cannot be read ("),
    ],
    ids=["payload", "payload inside", "dotted name", "no metadata", "junk"],
)
@pytest.mark.parametrize("command", ["fit", "export"])
def test_a_sharded_checkpoint_with_a_payload(
    content: bytes, problem: str, command: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files({"a.ckpt/.metadata": content, "a.ckpt/meta.pt": b""})
    args = ["export", "--output=my-dspark"] if command == "export" else small_fit()
    line = refusal([*args, "--ckpt_path=a.ckpt"], capsys)
    assert line.startswith(f"'a.ckpt' is no complete sharded checkpoint: {problem}")


def test_a_payload_beside_the_tensors(in_tmp: Path) -> None:
    path = write_sharded(a=torch.ones(2))
    (path / "meta.pt").write_bytes(PICKLE)
    with pytest.raises(ValueError, match=r"meta\.pt cannot be read"):
        read_sharded_meta(path)


def test_a_payload_in_place_of_a_tensor(in_tmp: Path) -> None:
    path = write_sharded(a=torch.ones(200))
    part = next(path.glob("*.distcp"))
    part.write_bytes(PICKLE.ljust(part.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match=r"^the checkpoint 'a.ckpt' cannot be read: UnpicklingError$"):
        read_sharded_weights(path)


def test_a_piece_outside_of_the_checkpoint(in_tmp: Path) -> None:
    path = write_sharded(a=torch.ones(2))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for piece in metadata.storage_data.values():
        piece.relative_path = "../a.ckpt/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names '\.\./a\.ckpt/__0_0\.distcp', which is not inside"):
        read_sharded_weights(path)


def copy_target(**config: Any) -> Path:
    """The embedded target in the folder `target`, with changes to its config."""
    shutil.copytree(embedded_path(), "target")
    changed = json.loads(Path("target/config.json").read_text()) | config
    Path("target/config.json").write_text(json.dumps(changed))
    return Path("target")


def test_a_target_with_a_payload_for_weights(in_tmp: Path) -> None:
    target = copy_target()
    (target / "model.safetensors").unlink()
    (target / "pytorch_model.bin").write_bytes(PICKLE)
    with pytest.raises(ValueError, match="a pickle that holds more than tensors, which is not run: give it as safeten"):
        load_target("./target")


def test_a_target_with_code_of_its_own(in_tmp: Path) -> None:
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    copy_target(model_type="strange", auto_map=remote)
    write_files({"target/code.py": SCRIPT})
    with pytest.raises(ValueError, match="runs code that comes with it: read that code, then set trust_remote_code"):
        load_target_config("./target")


def test_code_beside_a_known_architecture_is_passed_over(in_tmp: Path) -> None:
    copy_target(auto_map={"AutoConfig": "code.Config"})
    write_files({"target/code.py": SCRIPT})
    assert load_target_config("./target").model_type == "qwen3"


def test_a_draft_with_a_payload(in_tmp: Path) -> None:
    folder = export_draft(build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=1), "my-dspark")
    (folder / "model.safetensors").write_bytes(PICKLE)
    with pytest.raises(ValueError, match=r"cannot read 'my-dspark/model\.safetensors'"):
        load_pretrained_draft(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError,
        match=r"^'my-dspark' has 'pytorch_model.bin' and no model.safetensors: pickled weights .* never read, save",
    ):
        load_pretrained_draft(folder)


def test_a_shard_of_a_cache_with_a_payload(in_tmp: Path) -> None:
    Path("shard.safetensors").write_bytes(PICKLE)
    with pytest.raises(DamagedShard, match="it cannot be read"):
        read_index(Path("shard.safetensors"), "owner")


def test_a_cache_that_leads_out_of_its_folder(in_tmp: Path) -> None:
    """Damaged shards are deleted: a split that names another folder would have its files deleted."""
    write_files({"mine/model.safetensors": "mine", "cache/features/train/a": ""})
    sizes = {name: SplitSize(1, 1) for name in ("train", "../../mine")}
    fingerprint = Fingerprint(**dict.fromkeys(Fingerprint.__dataclass_fields__))
    write_manifest(Path("cache"), new_manifest("embedded", fingerprint, sizes, 1, 0))
    with pytest.raises(ValueError, match=r"splits \['train', '\.\./\.\./mine'\] must hold train and at most val"):
        FeatureCache(Path("cache"))


@pytest.mark.parametrize("data", ["data", "./data"])
def test_a_data_folder_with_a_script(data: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files({"data/data.py": SCRIPT, "data/rows.jsonl": chat_rows()})
    line = refusal(small_fit(data__init_args__train_data=data), capsys)
    assert line == f"train_data {data!r}, split 'train': Dataset scripts are no longer supported, but found data.py"


CLASS = "class_path: subprocess.Popen\n{0}init_args:\n{0}  args: [mkdir, boom]\n"
PLACES = {
    "trainer.callbacks[0]": ("trainer:\n  callbacks:\n  - " + CLASS.format("    "), "Callback"),
    "trainer.logger": ("trainer:\n  logger:\n    " + CLASS.format("    "), "Logger"),
    "trainer.strategy": ("trainer:\n  strategy:\n    " + CLASS.format("    "), "Strategy"),
    "model": ("model:\n  " + CLASS.format("  "), "DSparkModule"),
    "data": ("data:\n  " + CLASS.format("  "), "LightningDataModule"),
    "model.init_args.optimizer": (
        "model:\n  init_args:\n    optimizer:\n      " + CLASS.format("      "),
        "Optimizer",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_class_that_runs_a_program(place: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, base = PLACES[place]
    write_files({"bad.yaml": content})
    line = refusal(["fit", "--config", CONFIG, "--config", "bad.yaml"], capsys)
    assert line == f"bad.yaml: {place}.class_path: 'subprocess.Popen' is no {base}, of which a subclass must be named"


@pytest.mark.parametrize("place", ["--model", "--data", "--trainer.logger", "--trainer.callbacks+"])
def test_a_function_that_runs_a_program(place: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([*FIT, place, "os.mkdir"], capsys)
    assert line.startswith(f"{place.rstrip('+')}: 'os.mkdir' is no ")


CALLED = "class_path: {1}\n{0}init_args:\n{0}  {2}\n"
CALLABLES = {
    "model.init_args.optimizer": "model:\n  init_args:\n    optimizer:\n      {call}",
    "trainer.callbacks[0].init_args.on_train_start": (
        "trainer:\n  callbacks:\n  - class_path: LambdaCallback\n    init_args:\n      on_train_start:\n        {call}"
    ),
    "trainer.strategy.init_args.ddp_comm_hook": (
        "trainer:\n  strategy:\n    class_path: DDPStrategy\n    init_args:\n      ddp_comm_hook:\n        {call}"
    ),
}


@pytest.mark.parametrize("place", CALLABLES)
@pytest.mark.parametrize(
    ("function", "argument"), [("os.makedirs", "name: boom"), ("runpy.run_path", "path_name: s.py")]
)
@pytest.mark.parametrize("command", [["fit"], ["data", "inspect"]], ids=" ".join)
def test_a_function_where_any_callable_would_do(
    command: list[str], place: str, function: str, argument: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indent = " " * (6 if place.startswith("model") else 8)
    call = CALLED.format(indent, function, argument)
    write_files({"bad.yaml": CALLABLES[place].format(call=call), "s.py": SCRIPT})
    line = refusal([*command, "--config", CONFIG, "--config", "bad.yaml"], capsys)
    assert line == f"bad.yaml: {place}.class_path: {function!r} must be a class: functions are not called"


def test_a_tag_of_python_in_a_configuration(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files({"bad.yaml": "trainer: null\nmodel: !!python/object/apply:os.mkdir [boom]\n"})
    line = refusal(["fit", "--config", "bad.yaml"], capsys)
    assert line == (
        "the configuration 'bad.yaml', line 2: !!python/object/apply:os.mkdir is not read, a configuration holds plain "
        "values: give class_path and init_args"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ cycler.__init__.__globals__.os.mkdir('boom') }}", "access to attribute '__init__' of 'type' object"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object"),
        ("{% set _ = messages.append(messages) %}", "access to attribute 'append' of 'list' object"),
    ],
)
def test_a_chat_template_that_leaves_its_sandbox(
    template: str, reason: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files({"bad.jinja": template})
    line = refusal(small_fit(data__init_args__chat_template="bad.jinja"), capsys)
    assert line.startswith(f"rows.jsonl:1: bad.jinja refuses the conversation: {reason}")


@pytest.mark.parametrize("name", ["$(mkdir boom)-dspark", "a; mkdir boom; dspark", "'`mkdir boom`'dspark"])
def test_names_that_a_shell_would_run(name: str, in_tmp: Path) -> None:
    draft = build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=1)
    folder = export_draft(draft, name)
    assert folder.is_dir() and load_pretrained_draft(name).block_size == draft.block_size
    words = shlex.split(serve_command(folder, name, 4))
    assert words[:3] == ["vllm", "serve", name] and json.loads(words[4])["model"] == name


def test_ids_and_prompts_name_no_file(in_tmp: Path) -> None:
    files = OutputFiles(Path("out/answers.jsonl"))
    ids = ["../up", "/tmp/boom-row", "$(mkdir boom)", "a\nb"]
    files.begin({}, {})
    partial = PartialFile(files.partial(0))
    partial.append({"id": key, "prompt": "`mkdir boom`"} for key in ids)
    partial.close()
    assert files.finish(ids, []) == 4
    assert sorted(str(path) for path in Path().rglob("*")) == [
        "out",
        "out/answers.jsonl",
        "out/answers.jsonl.settings.json",
        "rows.jsonl",
    ]
    assert [json.loads(line)["id"] for line in Path("out/answers.jsonl").read_text().splitlines()] == ids

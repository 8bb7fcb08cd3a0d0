"""The commands that write for long, as small as they can be, and what must hold of what they leave."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from dspark_lightning.checkpoint_draft import load_checkpoint_draft, read_checkpoint
from dspark_lightning.embedded import embedded_data
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.pretrained import load_pretrained_draft
from feature_helpers import assert_same_rows
from kill_helpers import Commands


def settings(**values: object) -> list[str]:
    return [f"--{name.replace('__', '.')}={value}" for name, value in values.items()]


SAVING = {
    "dirpath": "checkpoints",
    "save_last": True,
    "every_n_train_steps": 2,
    "save_top_k": 2,
    "monitor": "step",
    "mode": "max",
}
EXPORTING = {"class_path": "dspark_lightning.callbacks.DraftExport", "init_args": {"dirpath": "drafts"}}
CALLBACKS = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": SAVING}, EXPORTING]
ROWS, STEPS = 24, 12
PAIR = settings(
    trainer__accelerator="cpu",
    trainer__devices=1,
    trainer__logger="false",
    trainer__enable_progress_bar="false",
    trainer__enable_model_summary="false",
    model="dspark_lightning.Qwen3DSpark",
    model__target="embedded",
    model__mask_token_id=5,
    model__num_draft_layers=1,
    model__block_size=4,
    model__num_anchors=4,
    model__markov_rank=8,
    data="dspark_lightning.datamodules.ChatDataModule",
    data__train_data="rows.jsonl",
    data__max_length=64,
    data__batch_size=4,
)
FIT = ["fit", *PAIR, *settings(trainer__max_steps=STEPS, trainer__callbacks=json.dumps(CALLBACKS), ckpt_path="last")]
PRECOMPUTE = ["precompute", *PAIR, "--cache=cache"]
REGENERATE = ["regenerate", "--data=rows.jsonl", "--output=answers.jsonl", "--target=embedded", "--accelerator=cpu"]
REGENERATE += ["--batch_size=4", "--max_new_tokens=16"]
EXPORT = ["export", "--ckpt_path=last.ckpt", "--output=my-dspark"]


class Kind(NamedTuple):
    """A command, and how what it leaves is looked at."""

    arguments: list[str]
    look: Callable[[Path], None]  # after a kill: nothing that is half written passes for whole
    same: Callable[[Path, Path], None]  # at the end, with the folder of an unbroken run


def look_at_fit(folder: Path) -> None:
    for path in folder.glob("checkpoints/*.ckpt"):
        load_checkpoint_draft(path)
    for path in folder.glob("drafts/*"):
        load_pretrained_draft(path)


def same_fit(folder: Path, unbroken: Path) -> None:
    ours, theirs = (read_checkpoint(path / "checkpoints" / "last.ckpt") for path in (folder, unbroken))
    assert ours["global_step"] == theirs["global_step"] == STEPS
    for mine, other in zip((ours, ours["optimizer_states"][0]), (theirs, theirs["optimizer_states"][0]), strict=True):
        torch.testing.assert_close(*(x.get("state_dict", x.get("state")) for x in (mine, other)), atol=0, rtol=0)
    same_export(folder / "drafts" / "dspark-draft", unbroken / "drafts" / "dspark-draft")


def look_at_cache(folder: Path) -> None:
    if (folder / "cache" / "manifest.json").exists():
        cache = FeatureCache(folder / "cache")
        assert not cache.damaged and not cache.verify()


def same_cache(folder: Path, unbroken: Path) -> None:
    assert_same_rows(*(FeatureCache(path / "cache") for path in (folder, unbroken)))
    assert not [path for path in folder.rglob("*") if "writing" in path.name]


def look_at_answers(folder: Path) -> None:
    if (folder / "answers.jsonl").exists():
        assert len((folder / "answers.jsonl").read_text().splitlines()) == ROWS


def same_answers(folder: Path, unbroken: Path) -> None:
    assert (folder / "answers.jsonl").read_bytes() == (unbroken / "answers.jsonl").read_bytes()
    assert not list(folder.glob("*.partial-*"))


def look_at_export(folder: Path) -> None:
    if (folder / "my-dspark").exists():
        load_pretrained_draft(folder / "my-dspark")


def same_export(folder: Path, unbroken: Path) -> None:
    assert load_file(folder / "model.safetensors").keys() == load_file(unbroken / "model.safetensors").keys()
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes()


KINDS = {
    "fit": Kind(FIT, look_at_fit, same_fit),
    "precompute": Kind(PRECOMPUTE, look_at_cache, same_cache),
    "regenerate": Kind(REGENERATE, look_at_answers, same_answers),
    "export": Kind(EXPORT, look_at_export, lambda a, b: same_export(a / "my-dspark", b / "my-dspark")),
}


class Stage:
    """Runs the commands in folders of their own.

    Args:
        commands: what starts them.
        folder: in which theirs are.
    """

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands = commands
        self.folder = folder
        self._unbroken: dict[str, tuple[Path, float]] = {}

    def unbroken(self, kind: str) -> tuple[Path, float]:
        """The folder of a run that nothing happens to, and how many seconds it takes; made once."""
        if kind not in self._unbroken:
            folder = self.folder / kind / "run"
            self.prepare(kind, folder)
            self._unbroken[kind] = folder, self.commands.finish(folder, KINDS[kind].arguments).seconds
        return self._unbroken[kind]

    def prepare(self, kind: str, folder: Path) -> None:
        """Put what a command reads into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with embedded_data("train").open() as lines:
            (folder / "rows.jsonl").write_text("".join(islice((x for x in lines if len(x) > 250), ROWS)))
        if kind == "export":
            trained, _ = self.unbroken("fit")
            shutil.copy(trained / "checkpoints" / "last.ckpt", folder)


@contextmanager
def small_disk(folder: Path, size: int, of_a_file: int) -> Iterator[dict[str, Any]]:
    """A disk of so many KiB at `folder`; where that is not permitted, what limits the size of files."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "disk", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield {} if mounted else {"no_room": of_a_file * 1024}
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)

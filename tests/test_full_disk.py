"""A disk that is full, really: one line says so, nothing half written is left, and with room the command goes on."""

import re
import subprocess
from pathlib import Path

import pytest

from fault_kinds import KINDS, Stage, small_disk

ROOM = {"fit": (12_000, 3_000), "precompute": (1_500, 500), "regenerate": (16, 5), "export": (4_000, 400)}
"""KiB of the disk, and of a file where no disk can be mounted: enough to begin, too little to end."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(kind: str, stage: Stage, tmp_path: Path) -> None:
    arguments, look, same = KINDS[kind]
    whole, _ = stage.unbroken(kind)
    with small_disk(tmp_path / "run", *ROOM[kind]) as limit:
        folder = tmp_path / "run"
        stage.prepare(kind, folder)
        ended = stage.commands.run(folder, arguments, **limit)
        assert ended.code == 2, ended.output[-2000:]
        reason = "File too large" if limit else "No space left on device"
        assert re.fullmatch(rf"dspark: error: .*cannot (write|cache) .*'.+': {reason}.*", ended.last_line)
        assert "Traceback" not in ended.output
        look(folder)
        assert limit or kind != "fit" or list(folder.glob("checkpoints/last.ckpt"))
        if not limit:
            subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
        stage.commands.finish(folder, arguments)
        look(folder)
        same(folder, whole)


@pytest.mark.parametrize(("size", "what"), [(4, "train_data 'rows.jsonl', split 'train'"), (20, "rows.jsonl [train]")])
def test_a_full_disk_where_rows_are_cached(size: int, what: str, stage: Stage, tmp_path: Path) -> None:
    """Too small for the rows as they are read, and for the rows as they are encoded."""
    folder = tmp_path / "run"
    stage.prepare("fit", folder)
    with small_disk(tmp_path / "datasets", size, 4) as limit:
        ended = stage.commands.run(folder, KINDS["fit"].arguments, **limit)
        assert ended.code == 2, ended.output[-2000:]
        problem = f"cannot cache its rows in {str(tmp_path / 'datasets')!r}: "
        assert ended.last_line.startswith(f"dspark: error: {what}: {problem}") or limit, ended.last_line

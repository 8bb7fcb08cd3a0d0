"""Checkpoints that several ranks write: what is in them, and where a fit goes on from them."""

import os
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from dspark_lightning import load_pretrained_draft
from dspark_lightning.checkpoint_draft import read_checkpoint
from dspark_lightning.cli import export, main
from dspark_lightning.sharded_checkpoint import read_sharded_weights
from ranks_checkpoint import Outcomes, Run, chosen_slow, make_runs

pytestmark = pytest.mark.distributed

KINDS = ("ddp", "fsdp1", "fsdp1-sharded", "fsdp2", "fsdp2-sharded")
QUICK = ("ddp", "fsdp2", "fsdp2-sharded")

# Saved under, by so many ranks, resumed under, by so many. The first three in every run of the tests.
ELSEWHERE = [
    ("ddp", 2, "fsdp2", 2),
    ("alone", 1, "fsdp2-sharded", 2),
    ("fsdp2-sharded", 2, "fsdp2-sharded", 1),
    ("ddp", 2, "fsdp1", 2),
    ("fsdp1", 2, "ddp", 2),
    ("fsdp1", 2, "fsdp2", 2),
    ("fsdp2", 2, "ddp", 2),
    ("fsdp2", 2, "fsdp1", 2),
    ("ddp", 2, "alone", 1),
    ("fsdp1", 2, "alone", 1),
    ("fsdp2", 2, "alone", 1),
    ("ddp", 2, "fsdp1", 1),
    ("ddp", 2, "fsdp2", 1),
    ("alone", 1, "ddp", 2),
    ("alone", 1, "fsdp1", 2),
    ("fsdp1-sharded", 2, "fsdp1-sharded", 1),
    ("fsdp1-sharded", 1, "fsdp1-sharded", 2),
    ("fsdp2-sharded", 1, "fsdp2-sharded", 2),
    ("fsdp1-sharded", 2, "fsdp1", 2),
    ("fsdp2", 2, "fsdp2-sharded", 2),
]
# Folders that the strategy cannot read. The first in every run of the tests.
REFUSED = [
    ("fsdp2-sharded", "FSDP2", "ddp", "DDPStrategy"),
    ("fsdp1-sharded", "FSDP1", "ddp", "DDPStrategy"),
    ("fsdp1-sharded", "FSDP1", "fsdp2-sharded", "DSparkFSDP2Strategy"),
    ("fsdp2-sharded", "FSDP2", "fsdp1-sharded", "CPUFSDPStrategy"),
]

each_kind = pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)


def first(cases: list[tuple[Any, ...]], count: int) -> list[Any]:
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[count:])]


def saved(kind: str, ranks: int) -> str:
    return kind if ranks == 2 else f"{kind} of one"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcomes:
    folder = tmp_path_factory.mktemp("runs")
    kinds, elsewhere, refused = (
        (KINDS, ELSEWHERE, REFUSED) if chosen_slow(request) else (QUICK, ELSEWHERE[:3], REFUSED[:1])
    )
    sources = dict.fromkeys([*((kind, 2) for kind in kinds), *((kind, ranks) for kind, ranks, _, _ in elsewhere)])
    runs = [Run(saved(kind, ranks), kind, ranks) for kind, ranks in sources]
    targets = [*((k, 2, k, 2) for k in kinds), *elsewhere, *((k, 2, other, 2) for k, _, other, _ in refused)]
    for kind, ranks, other, now in targets:
        source = saved(kind, ranks)
        runs.append(Run(f"{source} to {saved(other, now)}", other, now, str(folder / source / "step=3.ckpt")))
    return make_runs(folder, runs)


@each_kind
def test_a_checkpoint_holds_the_draft_and_nothing_of_the_target(outcomes: Outcomes, kind: str) -> None:
    path = outcomes.folder / kind / "step=3.ckpt"
    names = {f"draft.{name}" for name in outcomes.weights(kind)}
    assert read_checkpoint(path)["dspark"]["target"] == "embedded"
    if kind.endswith("sharded"):
        assert read_sharded_weights(path).keys() == names
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        states = (name.partition(".")[2] for name in entries)
        assert {name for name in states if not name.startswith(("draft.", "state.draft.", "param_groups."))} == set()
    else:
        assert torch.load(path)["state_dict"].keys() == names


def test_an_epoch_trains_every_row_once(outcomes: Outcomes) -> None:
    rows = outcomes.rows("ddp")
    assert len(rows) == 8 and sorted(chain(*rows[:5])) == list(range(20))
    assert len(set(chain(*rows[5:]))) == 12


@each_kind
def test_resuming_in_the_middle_of_an_epoch(outcomes: Outcomes, kind: str) -> None:
    resumed = f"{kind} to {kind}"
    torch.testing.assert_close(outcomes.weights(resumed), outcomes.weights(kind), atol=0, rtol=0)
    assert outcomes.rows(kind) == outcomes.rows("ddp")
    assert outcomes.rows(resumed) == outcomes.rows("ddp")[3:]
    path = outcomes.folder / kind / "step=3.ckpt"
    assert outcomes.log(resumed).count(f"Going on at step 3 of {path}\n") == 1


@pytest.mark.parametrize(("kind", "ranks", "other", "now"), first(ELSEWHERE, 3))
def test_resuming_elsewhere(outcomes: Outcomes, kind: str, ranks: int, other: str, now: int) -> None:
    resumed = f"{saved(kind, ranks)} to {saved(other, now)}"
    torch.testing.assert_close(outcomes.weights(resumed), outcomes.weights("ddp"), atol=1e-6, rtol=0)
    assert outcomes.rows(resumed) == outcomes.rows("ddp")[3:]


@pytest.mark.parametrize(("kind", "writer", "other", "strategy"), first(REFUSED, 1))
def test_a_folder_of_another_strategy_is_refused(
    outcomes: Outcomes, kind: str, writer: str, other: str, strategy: str
) -> None:
    name, path = f"{kind} to {other}", outcomes.folder / kind / "step=3.ckpt"
    assert outcomes.codes[name] == [1, 1]
    message = (
        f"ValueError: the checkpoint {str(path)!r} is a folder that {writer} wrote, which {strategy} cannot read: run "
        "under the strategy that wrote it, or export its draft and start from that with draft_init"
    )
    assert outcomes.log(name).splitlines()[-1] == message


@pytest.mark.parametrize("kind", [pytest.param("fsdp1", marks=pytest.mark.slow), "fsdp2"])
def test_a_sharded_checkpoint_is_served_as_the_file_is(outcomes: Outcomes, kind: str, tmp_path: Path) -> None:
    """Exported by the tool from file and folder, and by the callback, at a save and at the end."""
    tensors = {}
    for source in (kind, f"{kind}-sharded"):
        folder = outcomes.folder / source
        export(folder / "step=6.ckpt", tmp_path / f"{source}-dspark")
        for name, path in {
            "tool": tmp_path / f"{source}-dspark",
            "callback": folder / "dspark-step=6",
            "end": folder / "dspark-draft",
        }.items():
            tensors[source, name] = load_pretrained_draft(path).state_dict()
            assert all(tensor.dtype == torch.bfloat16 for tensor in tensors[source, name].values())
    for other in ((kind, "callback"), (f"{kind}-sharded", "tool"), (f"{kind}-sharded", "callback")):
        torch.testing.assert_close(tensors[other], tensors[kind, "tool"], atol=0, rtol=0)
    final = {name: tensor.bfloat16() for name, tensor in outcomes.weights(kind).items()}
    for source in (kind, f"{kind}-sharded"):
        torch.testing.assert_close(tensors[source, "end"], final, atol=0, rtol=0)
    assert not torch.equal(final["fc.weight"], tensors[kind, "tool"]["fc.weight"])


DAMAGES = {
    "a missing part": lambda path: (path / "__1_0.distcp").unlink(),
    "a part cut short": lambda path: os.truncate(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 1),
    "no meta.pt": lambda path: (path / "meta.pt").unlink(),
    "a damaged meta.pt": lambda path: (path / "meta.pt").open("ab").truncate(100),
    "no .metadata": lambda path: (path / ".metadata").unlink(),
    "an empty .metadata": lambda path: (path / ".metadata").write_bytes(b""),
    "an empty folder": lambda path: [entry.unlink() for entry in path.iterdir()],
}
PROBLEMS = {
    "a missing part": r"__1_0\.distcp is missing",
    "a part cut short": r"__0_0\.distcp has \d+ bytes of \d+",
    "no meta.pt": r"meta\.pt is missing",
    "a damaged meta.pt": r"meta\.pt cannot be read \(RuntimeError\)",
    "no .metadata": r"\.metadata is missing",
    "an empty .metadata": r"\.metadata cannot be read \(it is not what was written\)",
    "an empty folder": r"\.metadata is missing",
}
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_folder_is_refused_in_one_line(
    outcomes: Outcomes, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step=3.ckpt"
    shutil.copytree(outcomes.folder / "fsdp2-sharded" / "step=3.ckpt", path)
    DAMAGES[damage](path)
    for command in (["fit", "--config", str(CONFIG)], ["export", "--output=my-dspark"]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, f"--ckpt_path={path}"])
        line = capfd.readouterr().err.strip().splitlines()[-1]
        expected = f"dspark: error: {str(path)!r} is no complete sharded checkpoint: "
        assert line.startswith(expected)
        assert re.fullmatch(PROBLEMS[damage], line.removeprefix(expected)), line
    assert not (tmp_path / "my-dspark").exists()

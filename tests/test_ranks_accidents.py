"""A rank dies, or the disk is full, while a checkpoint is written: the previous one is there, and the fit goes on."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dspark_lightning.checkpoint_draft import read_checkpoint
from ranks_checkpoint import Outcomes, Run, chosen_slow, make_runs

pytestmark = pytest.mark.distributed


class Case(NamedTuple):
    """An accident at the second save, at step 6; the first was at step 3."""

    kind: str
    accident: str
    at: int
    slow: bool = False
    name: str = "last.ckpt"  # of the checkpoint that the next start takes
    problem: str = ""  # where the run ends with an error

    def __str__(self) -> str:
        return f"{self.kind} {self.accident} {self.at}"


FULL = "File too large"  # of the system
TORCH = "not all of it was written, is the disk full?"
CASES = [
    Case("ddp", "dies_writing_the_file", 0),
    Case("fsdp2-sharded", "dies_writing_its_part", 1),
    Case("fsdp2-sharded", "dies_between_the_renames", 0, name="last.outdated.ckpt"),
    Case("fsdp2-sharded", "disk_is_full", 1, slow=True, problem=f"{FULL} (on rank 1)"),
    Case("fsdp2-sharded", "disk_is_full_at_last", 0, problem=TORCH),
    Case("ddp", "dies_while_rank_0_writes", -1, slow=True),
    Case("fsdp1", "dies_writing_the_file", 0, slow=True),
    Case("fsdp2", "dies_writing_the_file", 0, slow=True),
    Case("fsdp1-sharded", "dies_writing_its_part", 1, slow=True),
    Case("fsdp1-sharded", "dies_writing_its_part", 0, slow=True),
    Case("fsdp1-sharded", "dies_between_the_renames", 0, slow=True, name="last.outdated.ckpt"),
    Case("ddp", "disk_is_full", 0, slow=True, problem=FULL),
    Case("fsdp1", "disk_is_full", 0, slow=True, problem=FULL),
    Case("fsdp2", "disk_is_full", 0, slow=True, problem=FULL),
    Case("fsdp1-sharded", "disk_is_full", 1, slow=True, problem=f"{FULL} (on rank 1)"),
    Case("fsdp2-sharded", "disk_is_full", 0, slow=True, problem=f"{FULL} (on rank 0)"),
    Case("fsdp1-sharded", "disk_is_full_at_last", 0, slow=True, problem=TORCH),
]


def marked(cases: list[Case]) -> Any:
    slow = pytest.mark.slow
    return pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=[slow] if c.slow else []) for c in cases])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcomes:
    """The accidents, then fits that go on from the last checkpoint, then unbroken fits, then the command line's."""
    folder = tmp_path_factory.mktemp("accidents")
    cases = [case for case in CASES if chosen_slow(request) or not case.slow]
    broken = [Run(str(c), c.kind, last=f"saved {c}", accident=c.accident, at=c.at) for c in cases]
    again = [Run(f"{c} again", c.kind, last=f"saved {c}", ckpt_path="last") for c in cases]
    # What ranks that are no more left beside a checkpoint is no part of the next one.
    left = folder / "saved fsdp2-sharded dies_writing_its_part 1" / ".last.ckpt.writing"
    left.mkdir(parents=True)
    (left / "__5_0.distcp").write_text("half")
    # A checkpoint that is only at its temporary name, asked for by its own one.
    path = folder / "saved fsdp2-sharded dies_between_the_renames 0" / "last.ckpt"
    named = Run("named", "fsdp2-sharded", last="unused", ckpt_path=str(path))
    unbroken = [Run(kind, kind) for kind in dict.fromkeys(c.kind for c in cases)]
    commands = [
        by_command(folder, "alone", 1),
        *([by_command(folder, "fsdp2-sharded", 2)] if chosen_slow(request) else []),
    ]
    return make_runs(folder, [*broken, named, *again, *unbroken, *commands])


def by_command(folder: Path, kind: str, ranks: int) -> Run:
    """A fit by the command line whose disk is full at the second save."""
    saving = {"dirpath": str(folder / f"command {kind}"), "every_n_train_steps": 3, "save_top_k": 0, "save_last": True}
    strategy = {"class_path": "dspark_lightning.strategies.DSparkFSDP2Strategy"}
    settings = {
        "trainer.accelerator": "cpu",
        "trainer.devices": ranks,
        "trainer.strategy": "auto" if kind == "alone" else json.dumps(strategy),
        "trainer.max_steps": 8,
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
        "trainer.callbacks": json.dumps(
            [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving}]
        ),
        "model": "dspark_lightning.Qwen3DSpark",
        "model.target": "embedded",
        "model.mask_token_id": 5,
        "model.num_draft_layers": 1,
        "model.block_size": 4,
        "model.num_anchors": 4,
        "model.markov_rank": 8,
        "data": "dspark_lightning.datamodules.ChatDataModule",
        "data.train_data": folder / "rows.jsonl",
        "data.max_length": 64,
        "data.batch_size": 4 // ranks,
    }
    arguments = ["fit", *(f"--{name}={value}" for name, value in settings.items())]
    return Run(f"command {kind}", ranks=ranks, accident="disk_is_full", at=-1, arguments=arguments)


@marked(CASES)
def test_the_accident_leaves_a_complete_checkpoint(outcomes: Outcomes, case: Case) -> None:
    assert 0 not in outcomes.codes[str(case)]
    if case.problem:
        path = outcomes.folder / f"saved {case}" / "last.ckpt"
        message = f"ValueError: cannot write the checkpoint {str(path)!r}: {case.problem}"
        told = [0] if case.kind == "ddp" else [0, 1]  # under DDP only rank 0 knows
        assert [outcomes.log(str(case), rank).splitlines()[-1] for rank in told] == [message] * len(told)
    else:
        assert outcomes.codes[str(case)][case.at] == -9


@marked(CASES)
def test_the_next_start_takes_the_checkpoint_and_ends_as_if_nothing_had_been(outcomes: Outcomes, case: Case) -> None:
    again, folder = f"{case} again", outcomes.folder / f"saved {case}"
    torch.testing.assert_close(outcomes.weights(again), outcomes.weights(case.kind), atol=0, rtol=0)
    assert outcomes.rows(again) == outcomes.rows(case.kind)[3:]
    assert f"Going on at step 3 of {folder / case.name}\n" in outcomes.log(again)
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]  # scratch and predecessor are gone
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 6
    assert not [*folder.rglob("__5_0.distcp")]


def test_a_checkpoint_at_its_temporary_name_is_pointed_at(outcomes: Outcomes) -> None:
    folder = outcomes.folder / "saved fsdp2-sharded dies_between_the_renames 0"
    assert outcomes.codes["named"] == [1, 1]
    assert outcomes.log("named").splitlines()[-1] == (
        f"ValueError: there is no checkpoint {str(folder / 'last.ckpt')!r}: a run died as it put a new one there; its "
        f"predecessor is {str(folder / 'last.outdated.ckpt')!r}"
    )


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("alone", FULL), pytest.param("fsdp2-sharded", f"{FULL} (on rank 0)", marks=pytest.mark.slow)],
)
def test_a_full_disk_ends_the_command_with_one_line(outcomes: Outcomes, kind: str, problem: str) -> None:
    name = f"command {kind}"
    assert set(outcomes.codes[name]) == {2}
    path = outcomes.folder / name / "last.ckpt"
    line = f"dspark: error: cannot write the checkpoint {str(path)!r}: {problem}"
    assert outcomes.log(name).splitlines()[-1] == line
    assert "Traceback" not in outcomes.log(name)
    assert read_checkpoint(path)["global_step"] == 3

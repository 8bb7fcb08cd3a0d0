"""Files of a feature cache: what is written is what is read, and nothing else is."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_lightning.features.hashing import checksum, content_hash
from dspark_lightning.features.shard import DamagedShard, is_abandoned, read_index, read_row, write_shard
from feature_helpers import random_row

ROWS = [random_row(5, seed=1), random_row(9, seed=2), random_row(1, seed=3)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path, "mine", [7, 3, 11], ROWS)


def test_rows_come_back_bit_for_bit_at_their_true_length(shard: Path) -> None:
    index = read_index(shard, "mine")

    assert index.row_ids.tolist() == [7, 3, 11]
    assert index.offsets.tolist() == [0, 5, 14, 15]
    for i, row in enumerate(ROWS):
        read = read_row(shard, int(index.offsets[i]), int(index.offsets[i + 1]), int(index.checksums[i]))
        assert [x.dtype for x in read] == [torch.int32, torch.uint8, torch.bfloat16, torch.bfloat16]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(read, row, strict=True))


def test_bytes_per_token_are_those_of_the_estimate(tmp_path: Path) -> None:
    from dspark_lightning.features.estimate import bytes_per_token

    row = random_row(1000)

    assert sum(x.nbytes for x in row) == 1000 * bytes_per_token(num_features=2, hidden_size=6) == 1000 * (2 * 18 + 5)


@pytest.mark.parametrize("place", range(0, 1000, 37))
def test_a_flipped_bit_is_noticed_wherever_it_is(shard: Path, place: int) -> None:
    content = bytearray(shard.read_bytes())
    content[place % len(content)] ^= 4
    shard.write_bytes(bytes(content))

    with pytest.raises(DamagedShard):
        index = read_index(shard, "mine")
        for i in range(3):
            read_row(shard, int(index.offsets[i]), int(index.offsets[i + 1]), int(index.checksums[i]))


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
def test_a_file_that_is_cut_off_is_noticed(shard: Path, kept: int) -> None:
    shard.write_bytes(shard.read_bytes()[:kept])

    with pytest.raises(DamagedShard, match="cannot be read"):
        read_index(shard, "mine")


def test_a_shard_of_another_cache_is_noticed(shard: Path) -> None:
    with pytest.raises(DamagedShard, match="content hash"):
        read_index(shard, "another")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "features").write_text("a file in the place of the folder")

    with pytest.raises(OSError):
        write_shard(tmp_path / "features", "mine", [0], ROWS[:1])

    assert [path.name for path in tmp_path.iterdir()] == ["features"]


def test_a_sound_shard_of_the_same_rows_stays_and_a_damaged_one_goes(shard: Path) -> None:
    others = [random_row(len(row.input_ids), seed=9) for row in ROWS]
    whole = shard.read_bytes()

    assert write_shard(shard.parent, "mine", [7, 3, 11], others) == shard
    assert shard.read_bytes() == whole  # whoever has read the index still finds the rows that belong to it

    shard.write_bytes(whole[:200])
    write_shard(shard.parent, "mine", [7, 3, 11], ROWS)
    assert shard.read_bytes() == whole
    assert list(shard.parent.iterdir()) == [shard]


@pytest.mark.parametrize(
    ("host", "process", "age", "abandoned"),
    [
        (socket.gethostname(), os.getpid(), 0, False),
        (socket.gethostname(), 2**22 + 1, 0, True),  # above the largest that Linux gives
        ("elsewhere", 1, 0, False),
        ("elsewhere", 1, 4000, True),
        (socket.gethostname(), "x", 0, True),
    ],
    ids=["running", "ended", "on another machine", "long ago on another machine", "no process id"],
)
def test_only_what_nobody_writes_any_more_is_abandoned(
    tmp_path: Path, host: str, process: object, age: int, abandoned: bool
) -> None:
    scratch = tmp_path / f".000000003-0123.safetensors.{host}.{process}.writing"
    scratch.touch()
    written = scratch.stat().st_mtime - age
    os.utime(scratch, (written, written))

    assert is_abandoned(scratch) == abandoned


def test_hashes_do_not_depend_on_how_arrays_lie_in_memory() -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)

    assert checksum([values.T]) == checksum([np.ascontiguousarray(values.T)]) != checksum([values])
    assert content_hash([torch.from_numpy(values)]) == content_hash([values]) == content_hash([values[:1], values[1:]])

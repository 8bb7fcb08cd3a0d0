"""Rows and configurations that were cut off, or in which a bit has flipped."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bad_input_helpers import CONFIG, chat_rows, tree, write_files
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.cli import main
from dspark_lightning.datamodules import ChatDataModule

ROWS = chat_rows(8).encode()


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(1, len(content))]


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def texts(path: Path, max_bad_rows: int = 2) -> Counter[tuple[int, ...]]:
    """The rows that are kept, as token ids."""
    data = ChatDataModule(
        str(path),
        mask_token_id=5,
        max_length=256,
        tokenizer="embedded",
        min_supervised_tokens=2,
        max_bad_rows=max_bad_rows,
    )
    data.setup("fit")
    pairs = [pair for b in data.train_dataloader() for pair in zip(b["input_ids"], b["attention_mask"], strict=True)]
    return Counter(tuple(row[mask == 1].tolist()) for row, mask in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[int, ...]]:
    path = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    path.write_bytes(ROWS)
    return texts(path)


@pytest.mark.parametrize("seed", range(8))
def test_rows_before_the_cut_stay(seed: int, whole: Counter[tuple[int, ...]], tmp_path: Path) -> None:
    content = cut(ROWS[ROWS.index(b"\n") + 1 :], random.Random(seed))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS[: ROWS.index(b"\n") + 1] + content)
    complete = 1 + content.count(b"\n") + content.endswith(b"}]}")
    if not content.endswith((b"}]}", b"\n")):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:{complete + 1}: not JSON: "):
            texts(path, max_bad_rows=0)
    found = texts(path)
    assert found.total() == complete and found <= whole


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_reaches_no_row_but_its_own(seed: int, whole: Counter[tuple[int, ...]], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(flip(ROWS, random.Random(seed)))
    lost = whole - texts(path)
    assert lost.total() <= 1 + (path.read_bytes().count(b"\n") < ROWS.count(b"\n"))  # two where they became one line


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_configuration_is_read_or_refused_in_one_line(
    damage: Callable[[bytes, random.Random], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, content, refused = random.Random(0), Path(CONFIG).read_bytes(), 0
    for _ in range(12):
        write_files({"my.yaml": damage(content, draw)})
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", "my.yaml", "--print_config"])
        out, err = capsys.readouterr()
        if ended.value.code == 0:
            assert "trainer:" in out
        else:
            refused += 1
            assert ended.value.code == 2 and err.startswith("dspark: error: ") and err.count("\n") == 1
        assert tree() == {Path("my.yaml")}
    assert refused >= 2

"""Files that were cut off or in which a bit has flipped: named in one line, or as good as they were."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dspark_lightning import build_draft_model, export_draft, load_pretrained_draft
from dspark_lightning.checkpoint_content import check_content
from dspark_lightning.checkpoint_draft import load_checkpoint_draft
from dspark_lightning.checkpoints import WholeFileIO
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.sharded_checkpoint import read_sharded_weights, seal
from helpers import seeded, tiny_qwen3_config

FLIPS = 40


@pytest.fixture(scope="module")
def draft() -> DSparkDraft:
    with seeded(0):
        return build_draft_model(
            tiny_qwen3_config(), num_draft_layers=1, block_size=3, num_anchors=4, markov_rank=4, mask_token_id=5
        )


def write_file(draft: DSparkDraft, path: Path) -> Path:
    torch.save(parts(draft) | {"state_dict": named(draft)}, path)
    return path


def write_folder(draft: DSparkDraft, path: Path) -> Path:
    """What FSDP2 writes, of one rank."""
    save({"state_dict": named(draft)}, checkpoint_id=path, no_dist=True)
    torch.save(parts(draft), path / "meta.pt")
    seal(path)
    return path


def named(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    return {f"draft.{name}": tensor for name, tensor in draft.state_dict().items()}


def parts(draft: DSparkDraft) -> dict[str, Any]:
    config = draft.config.to_dict()
    return {"dspark": {"draft_config": config, "target": "org/name", "target_fingerprint": "0"}, "global_step": 3}


def flip_bit(path: Path, place: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def flip_in(path: Path, tensor: torch.Tensor) -> None:
    """Flip a bit of a tensor's first number, as it lies in the file."""
    place = path.read_bytes().find(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert place > 0
    flip_bit(path, place)


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_flipped_bit_in_a_weight_is_found(write: Callable[..., Path], draft: DSparkDraft, tmp_path: Path) -> None:
    path = write(draft, tmp_path / "x.ckpt")
    check_content(path)
    check_content(path, 0, 2), check_content(path, 1, 2)
    flip_in(path / "__0_0.distcp" if path.is_dir() else path, draft.state_dict()["fc.weight"])
    expected = rf"the checkpoint '{path}' is damaged: '.*' in '.*' is not what was written; take another one$"
    with pytest.raises(ValueError, match=expected):
        load_checkpoint_draft(path)
    if path.is_file():
        with pytest.raises(ValueError, match=expected):
            WholeFileIO(torch.nn.Module).load_checkpoint(path)  # type: ignore[arg-type]
    found = 0
    for share in range(2):  # one of two ranks finds it
        try:
            check_content(path, share, 2)
        except ValueError:
            found += 1
    assert found == 1


def test_a_flipped_bit_anywhere_in_a_checkpoint_file_changes_nothing_unseen(draft: DSparkDraft, tmp_path: Path) -> None:
    path = write_file(draft, tmp_path / "x.ckpt")
    flip_everywhere(path, path, draft, lambda: load_checkpoint_draft(path)[0].state_dict())


def test_a_flipped_bit_anywhere_in_a_checkpoint_folder_changes_nothing_unseen(
    draft: DSparkDraft, tmp_path: Path
) -> None:
    path = write_folder(draft, tmp_path / "x.ckpt")
    for name in ("__0_0.distcp", "meta.pt", ".metadata"):
        flip_everywhere(path / name, path, draft, lambda: load_checkpoint_draft(path)[0].state_dict())
    assert read_sharded_weights(path).keys() == named(draft).keys()


def test_a_flipped_bit_anywhere_in_an_export_changes_nothing_unseen(draft: DSparkDraft, tmp_path: Path) -> None:
    path = export_draft(draft, tmp_path / "x-dspark")
    expected = draft.state_dict() | load_pretrained_draft(path).state_dict()
    flip_everywhere(path / "model.safetensors", path, draft, lambda: load_pretrained_draft(path).state_dict(), expected)


def flip_everywhere(
    file: Path,
    path: Path,
    draft: DSparkDraft,
    read: Callable[[], dict[str, torch.Tensor]],
    expected: dict[str, torch.Tensor] | None = None,
) -> None:
    """Flip bits one at a time, at the beginning, at the end and anywhere: refused in one line, or not noticeable."""
    size, rng, refused = file.stat().st_size, random.Random(0), 0
    ends = [*range(0, 200, 20), *range(size - 200, size, 20)]
    for place in [*ends, *(rng.randrange(size) for _ in range(FLIPS))]:
        bit = rng.randrange(8)
        flip_bit(file, place, bit)
        try:
            found = read()
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error), f"byte {place}: {error}"
        else:
            torch.testing.assert_close(found, expected or draft.state_dict(), atol=0, rtol=0)
        flip_bit(file, place, bit)
    assert refused > FLIPS / 2

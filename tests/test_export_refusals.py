"""What export_draft refuses to write, and to write over."""

from pathlib import Path

import pytest

from dspark_lightning import build_draft_model, export_draft
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.pretrained import load_draft_weights
from helpers import tiny_qwen3_config


def draft() -> DSparkDraft:
    return build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=1)


def test_a_folder_with_other_content_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "dspark-work"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis\.txt', so it is no earlier export"):
        export_draft(draft(), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["dspark-work", "thesis.txt"]


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my-dspark").write_text("mine")
    with pytest.raises(ValueError, match="is a file or a link"):
        export_draft(draft(), tmp_path / "my-dspark")
    assert (tmp_path / "my-dspark").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to '.*/file': "):
        export_draft(draft(), tmp_path / "file" / "my-dspark")


def test_who_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    folder = export_draft(draft(), tmp_path / "my-dspark")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    broken = draft()
    broken.get_parameter("fc.weight").data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'fc\.weight' holds NaN"):
        export_draft(broken, tmp_path / "my-dspark")
    assert list(tmp_path.iterdir()) == []


def test_training_does_not_start_from_damaged_weights(tmp_path: Path) -> None:
    folder = export_draft(draft(), tmp_path / "my-dspark")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged, its weights are not those that were exported"):
        load_draft_weights(draft(), folder)

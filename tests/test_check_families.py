"""The checks know every family: a sound draft beside its tiny target passes, beside another one it does not."""

from pathlib import Path

import pytest
import torch

from dspark_lightning.export import export_draft
from dspark_lightning.serving.check import Target, check_folder
from dspark_lightning.serving.decode_check import decode_prompts, keep_decoded
from dspark_lightning.serving.record import ExportRecord, read_record
from family_helpers import FAMILIES, build_pair, shake, token_ids

PROMPTS: list[list[int]] = token_ids(1, 9).tolist()
NO_TOKENIZER = "there is none"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_draft_passes(family: str, tmp_path: Path) -> None:
    target, draft = build_pair(family)
    shake(draft)
    folder = export_draft(draft, tmp_path / "my-dspark")
    record = keep_decoded(target.model, folder, ExportRecord(target=family, prompts=PROMPTS))
    assert read_record(folder) == record and record.decoded is not None
    outcomes = {each.check: each for each in check_folder(folder, Target(target.model, NO_TOKENIZER), record)}
    unsound = {name: each.line for name, each in outcomes.items() if each.outcome != "ok"}
    assert unsound == {"mask token in text": f"the tokenizer cannot be read: {NO_TOKENIZER}"}
    assert outcomes["decode"].line.endswith("at the export (tolerance 0%)")


def test_a_draft_of_another_family_is_named(tmp_path: Path) -> None:
    folder = export_draft(build_pair("qwen3")[1], tmp_path / "my-dspark")
    found = check_folder(folder, Target(build_pair("glm_moe_dsa")[0].model, NO_TOKENIZER), None)
    assert [(each.check, each.outcome) for each in found[-2:]] == [("target", "error"), ("decode", "skipped")]
    assert found[-2].line == "the draft is a Qwen3DSparkModel, must be a Glm5_2DSparkModel for a 'glm_moe_dsa' target"
    assert found[-1].line == "the draft cannot be loaded beside this target: see target"


def test_prompts_that_are_too_long_for_the_target_are_left_out(tmp_path: Path) -> None:
    target, draft = build_pair("qwen3")
    folder = export_draft(draft, tmp_path / "my-dspark")
    most = target.model.config.max_position_embeddings
    few = decode_prompts(target.model, folder, [PROMPTS[0]], max_new_tokens=6)
    same = decode_prompts(target.model, folder, [[7] * (most - 5), PROMPTS[0], []], max_new_tokens=6)
    assert few is not None and same == few
    assert decode_prompts(target.model, folder, [[7] * most], max_new_tokens=6) is None


def test_decoding_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    target, draft = build_pair("qwen3")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    decode_prompts(target.model, export_draft(draft, tmp_path / "my-dspark"), PROMPTS, max_new_tokens=6)
    after = target.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

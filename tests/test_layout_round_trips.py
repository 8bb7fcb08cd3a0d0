"""From our own folder to another layout and back: the same tensors and the same config."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dspark_lightning import build_draft_model, export_draft, load_pretrained_draft
from dspark_lightning.cli import main
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.embedded import embedded_path
from dspark_lightning.layouts.written import ExportLayout
from family_helpers import FAMILIES, VARIANTS, build_pair, shake
from helpers import seeded, tiny_qwen3_config
from layout_helpers import DEEPSPEC, SPECULATORS, WITH_HEADS, same_draft, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*(SGLang|vLLM|llama)")
OTHERS: tuple[ExportLayout, ...] = ("deepspec", "speculators")

draft_settings = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 9),
        "mask_token_id": st.integers(0, 96),
        "num_draft_layers": st.integers(1, 2),
        "num_anchors": st.integers(1, 600),
        "markov_rank": st.sampled_from([0, 1, 8]),
        "markov_head_type": st.sampled_from(["vanilla", "gated", "rnn"]),
        "confidence_head_alpha": st.sampled_from([0.0, 1.0]),
        "confidence_head_with_markov": st.booleans(),
        "target_layer_ids": st.sets(st.integers(-1, 5), min_size=1, max_size=4).map(sorted),
    }
)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names and the same bits."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)


def assert_round_trip(draft: DSparkDraft, layout: ExportLayout, folder: Path) -> None:
    own = load_pretrained_draft(export_draft(draft, folder / "own-dspark"))
    target = "embedded" if layout == "speculators" else None
    other = load_pretrained_draft(export_draft(own, folder / "other-dspark", layout=layout, target=target))
    back = load_pretrained_draft(export_draft(other, folder / "back-dspark"))
    assert equal(other.state_dict(), own.state_dict()) and equal(back.state_dict(), own.state_dict())
    assert other.config.to_dict() == own.config.to_dict() == back.config.to_dict()
    for name in ("config.json", "model.safetensors"):
        assert (folder / "back-dspark" / name).read_bytes() == (folder / "own-dspark" / name).read_bytes()


@pytest.mark.parametrize("layout", OTHERS)
@settings(deadline=None, max_examples=25)
@given(changes=draft_settings)
def test_there_and_back(layout: ExportLayout, changes: dict[str, Any]) -> None:
    with seeded(0), TemporaryDirectory() as folder:
        assert_round_trip(build_draft_model(tiny_qwen3_config(), **changes), layout, Path(folder))


@pytest.mark.parametrize("layout", WITH_HEADS)
def test_what_others_wrote_goes_along_too(layout: str, tmp_path: Path) -> None:
    """Though not all say how many layers the target has."""
    assert_round_trip(load_pretrained_draft(WITH_HEADS[layout](tmp_path / "theirs")), "speculators", tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_deepspec_holds_every_family(family: str, tmp_path: Path) -> None:
    draft = build_pair(family)[1]
    shake(draft)
    assert_round_trip(draft, "deepspec", tmp_path)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}, {"rope_theta": 1e6}])
@pytest.mark.parametrize("layout", OTHERS)
def test_rope_settings_go_along(layout: ExportLayout, rope: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_qwen3_config(rope_parameters={"rope_type": "default", **rope})
    draft = build_draft_model(config, mask_token_id=96, num_draft_layers=1, num_anchors=3)
    assert_round_trip(draft, layout, tmp_path)
    loaded = load_pretrained_draft(tmp_path / "other-dspark")
    assert loaded.config.rope_parameters["rope_theta"] == rope["rope_theta"]
    assert loaded.rotary_emb.inv_freq.equal(draft.rotary_emb.inv_freq)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_what_is_written_for_deepspec(tmp_path: Path) -> None:
    """The fields of the hand-written folder, none for engines, and the tensors under its names."""
    folder = export_draft(same_draft(), tmp_path / "dspark", layout="deepspec")
    config = read_config(folder)
    assert {name: config[name] for name in DEEPSPEC} == DEEPSPEC
    for name in ("eagle_aux_hidden_state_layer_ids", "sample_from_anchor", "dspark_bonus_anchor", "dflash_config"):
        assert name not in config
    assert equal(load_file(folder / "model.safetensors"), tensors())


def test_what_is_written_for_speculators(tmp_path: Path) -> None:
    folder = export_draft(same_draft(), tmp_path / "dspark", layout="speculators", target="embedded")
    config, nested = read_config(folder), SPECULATORS["transformer_layer_config"]
    assert isinstance(nested, dict)
    assert {name: config["transformer_layer_config"][name] for name in nested} == nested
    same = SPECULATORS.keys() - {"transformer_layer_config", "speculators_config", "architectures"}
    assert {name: config[name] for name in same} == {name: SPECULATORS[name] for name in same}
    assert config["speculators_config"] == {
        "algorithm": "dspark",
        "proposal_methods": [{"speculative_tokens": 4}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": str(embedded_path()), "architectures": ["Qwen3ForCausalLM"]},
    }
    assert equal(load_file(folder / "model.safetensors"), tensors())


def assert_refused(complaint: str, draft: DSparkDraft, folder: Path, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        export_draft(draft, folder / "dspark", **arguments)
    assert "\n" not in str(error.value) and list(folder.iterdir()) == []


def test_layouts_that_cannot_hold_a_draft(tmp_path: Path) -> None:
    gemma = build_pair("gemma4")[1]
    assert_refused(
        "holds drafts of type Qwen3DSparkModel, not Gemma4DSparkModel: export with dspark or deepspec",
        gemma,
        tmp_path,
        layout="speculators",
        target="embedded",
    )
    assert_refused("give target, a folder or a hub id", same_draft(), tmp_path, layout="speculators")
    assert_refused(
        "no layout 'gguf' to export: known are dspark, deepspec, spec", same_draft(), tmp_path, layout="gguf"
    )
    assert_refused("nowhere", same_draft(), tmp_path, layout="speculators", target=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("layout", OTHERS)
def test_the_command(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = {"draft_config": same_draft().config.to_dict(), "target": "embedded", "target_fingerprint": "0"}
    state = {f"draft.{name}": tensor for name, tensor in same_draft().state_dict().items()}
    checkpoint = tmp_path / "x.ckpt"
    torch.save({"dspark": identity, "state_dict": state}, checkpoint)
    folder = tmp_path / "my-dspark"
    main(["export", f"--ckpt_path={checkpoint}", f"--output={folder}", f"--format={layout}"])
    assert ("speculators_model_type" in read_config(folder)) == (layout == "speculators")
    assert equal(load_pretrained_draft(folder).state_dict(), tensors())
    assert f"--model.init_args.draft_init {folder}" in capsys.readouterr().out

"""Folders of other tools, written by hand to what they publish: loaded, and started from."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig

from dspark_lightning import load_pretrained_draft
from dspark_lightning.evaluation.pair import pair_up
from dspark_lightning.export import export_draft
from dspark_lightning.pretrained import load_draft_weights
from dspark_lightning.serving.engines import engine_limits
from family_helpers import build_pair, shake
from helpers import seeded, tiny_qwen3
from layout_helpers import (
    BACKBONE,
    DEEPSPEC,
    DFLASH,
    WITH_HEADS,
    backbone_tensors,
    same_draft,
    tensors,
    write_dflash,
    write_folder,
)

NO_HEADS = {"markov_rank": 0, "confidence_head_alpha": 0.0}


def outputs(draft: Any, hidden: int = 32) -> list[Tensor]:
    """Logits and confidences on fixed inputs."""
    ids = torch.arange(12).unsqueeze(0)
    with seeded(0):
        features = torch.randn(1, 12, 2 * hidden).to(draft.dtype)
    anchors = {"anchor_positions": torch.tensor([[2, 5]]), "block_keep_mask": torch.tensor([[True, True]])}
    out = draft(ids, features, torch.ones_like(ids), **anchors)
    return [x for x in (out.draft_logits, out.confidence_pred) if x is not None]


def assert_same_outputs(a: Any, b: Any, hidden: int = 32) -> None:
    for x, y in zip(outputs(a, hidden), outputs(b, hidden), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", WITH_HEADS)
def test_a_folder_written_by_hand_is_the_same_draft(layout: str, tmp_path: Path) -> None:
    loaded, own = load_pretrained_draft(WITH_HEADS[layout](tmp_path / "draft")), same_draft()
    assert type(loaded) is type(own) and not loaded.training
    assert loaded.target_layer_ids == [1, 3] and (loaded.block_size, loaded.mask_token_id) == (4, 96)
    assert loaded.state_dict().keys() == tensors().keys()
    assert_same_outputs(loaded, own)


def test_a_dflash_folder_is_a_draft_without_heads(tmp_path: Path) -> None:
    loaded = load_pretrained_draft(write_dflash(tmp_path / "draft"))
    assert loaded.markov_head is None and loaded.confidence_head is None
    assert loaded.target_layer_ids == [1, 3] and (loaded.block_size, loaded.mask_token_id) == (4, 96)
    assert_same_outputs(loaded, same_draft(**NO_HEADS))


def test_dflash_fields_beside_dflash_config(tmp_path: Path) -> None:
    config = DFLASH | {"dflash_config": {"target_layer_ids": [1, 3]}, "block_size": 4, "mask_token_id": 96}
    loaded = load_pretrained_draft(write_folder(tmp_path / "draft", config, backbone_tensors()))
    assert_same_outputs(loaded, same_draft(**NO_HEADS))


def test_a_deepspec_folder_without_heads_leaves_their_fields_out(tmp_path: Path) -> None:
    config = DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}
    del config["markov_head_type"], config["confidence_head_with_markov"]
    loaded = load_pretrained_draft(write_folder(tmp_path / "draft", config, backbone_tensors()))
    assert_same_outputs(loaded, same_draft(**NO_HEADS))


def test_a_tied_head_may_be_left_out(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    loaded = load_pretrained_draft(write_folder(tmp_path / "a", DEEPSPEC | {"tie_word_embeddings": True}, weights))
    assert torch.equal(loaded.lm_head.weight, tensors()["embed_tokens.weight"])
    assert loaded.config.tie_word_embeddings is False
    with pytest.raises(ValueError, match=r"'lm_head\.weight' has shape None in .* the draft needs \(97, 32\)"):
        load_pretrained_draft(write_folder(tmp_path / "b", DEEPSPEC, weights))


@pytest.mark.parametrize("keys_are_values", [True, False])
def test_gemmas_flat_config_holds_the_heads_of_both_kinds_of_layers(keys_are_values: bool, tmp_path: Path) -> None:
    """Its windowed layers have two heads of size 16; the draft's layers are global ones."""
    _, draft = build_pair("gemma4" if keys_are_values else "gemma4_noeq")
    shake(draft)
    rope = draft.config.to_dict()["rope_parameters"]
    config = {
        **{name: getattr(draft.config, name) for name in DEEPSPEC.keys() - BACKBONE.keys() if name != "dtype"},
        **{name: getattr(draft.config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")},
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,  # counts where keys are values only
        "attention_k_eq_v": keys_are_values,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["full_attention", "full_attention"],
        "final_logit_softcapping": 30.0,
        "rope_parameters": rope,
        "hidden_size_per_layer_input": 0,
    }
    weights = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    loaded = load_pretrained_draft(write_folder(tmp_path / "draft", config, weights))
    assert isinstance(loaded.config, Gemma4TextConfig)
    assert_same_outputs(loaded, draft.eval(), hidden=draft.config.hidden_size)


LEFT_OVER: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM's list of the target's layers": ("glm_moe_dsa", {"layer_types": ["full_attention"] * 4}),
    "MiniMax's 8 of 16 channels that turn": ("minimax_m3_vl", {"rope_parameters": None, "rotary_dim": 8}),
    "MiniMax's, with the theta": ("minimax_m3_vl", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}


@pytest.mark.parametrize("case", LEFT_OVER)
def test_configs_copied_from_the_targets(case: str, tmp_path: Path) -> None:
    family, changes = LEFT_OVER[case]
    _, draft = build_pair(family)
    shake(draft)
    folder = export_draft(draft.bfloat16(), tmp_path / "dspark", layout="deepspec")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({n: value for n, value in config.items() if value is not None}))
    assert_same_outputs(load_pretrained_draft(folder), draft.eval(), hidden=draft.config.hidden_size)


@pytest.mark.parametrize("layout", WITH_HEADS)
def test_starting_weights(layout: str, tmp_path: Path) -> None:
    draft, given = same_draft().float(), tensors()
    for parameter in draft.parameters():
        parameter.data.fill_(0.5)  # nothing of it is left, except what is the target's
    assert load_draft_weights(draft, WITH_HEADS[layout](tmp_path / "draft")) == []
    for name, tensor in draft.state_dict().items():
        of_target = name in ("embed_tokens.weight", "lm_head.weight")
        assert torch.equal(tensor, torch.full_like(tensor, 0.5) if of_target else given[name].float())


def test_starting_from_dflash_leaves_the_new_heads_as_they_are(tmp_path: Path) -> None:
    draft, given = same_draft().float(), tensors()
    for parameter in draft.parameters():
        parameter.data.fill_(0.5)
    assert load_draft_weights(draft, write_dflash(tmp_path / "draft")) == ["markov_head", "confidence_head"]
    for name, tensor in draft.state_dict().items():
        kept = name.startswith(("embed_tokens", "lm_head", "markov_head", "confidence_head"))
        assert torch.equal(tensor, torch.full_like(tensor, 0.5) if kept else given[name].float())


def test_our_own_draft_without_heads_serves_as_well(tmp_path: Path) -> None:
    with pytest.warns(match="SGLang"):
        folder = export_draft(same_draft(**NO_HEADS), tmp_path / "dspark")
    assert load_draft_weights(same_draft(**NO_HEADS), folder) == []
    assert load_draft_weights(same_draft(confidence_head_alpha=0.0), folder) == ["markov_head"]
    assert load_draft_weights(same_draft(block_size=7), folder) == [
        "markov_head",
        "confidence_head",
    ]


def test_starting_weights_need_no_embedding_and_head(tmp_path: Path) -> None:
    """A folder that leaves them to the target can be started from, not loaded."""
    weights = {n: t for n, t in backbone_tensors().items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    folder = write_folder(tmp_path / "draft", DFLASH, weights)
    assert load_draft_weights(same_draft(), folder) == ["markov_head", "confidence_head"]
    with pytest.raises(ValueError, match=r"'embed_tokens\.weight' has shape None"):
        load_pretrained_draft(folder)


def test_shards_may_be_links_as_in_a_download_cache(tmp_path: Path) -> None:
    folder, blobs = WITH_HEADS["automodel"](tmp_path / "draft"), tmp_path / "blobs"
    blobs.mkdir()
    for number, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        shard.rename(blobs / str(number))
        shard.symlink_to(Path("..") / "blobs" / str(number))
    assert_same_outputs(load_pretrained_draft(folder), same_draft())


@pytest.mark.filterwarnings("ignore:the draft's embedding and head are not")
def test_how_many_layers_the_target_has_may_be_unknown(tmp_path: Path) -> None:
    loaded = load_pretrained_draft(WITH_HEADS["speculators"](tmp_path / "draft"))
    assert loaded.config.num_target_layers is None and engine_limits(loaded.config) == []
    assert pair_up(tiny_qwen3(), copy.deepcopy(loaded)).target_layer_ids == [1, 3]
    loaded.config.target_layer_ids = [-1, 3]
    assert [limit.line for limit in engine_limits(loaded.config)] == [
        "SGLang cannot capture feature layer -1: use layers from 0 on, not the last"
    ]

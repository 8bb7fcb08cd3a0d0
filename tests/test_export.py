"""The servable folder: what is in it, that it comes back bit for bit, and that a failure leaves the old one."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from dspark_lightning import export
from dspark_lightning.checkpoint_draft import load_checkpoint_draft
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.export import check_export_path, export_draft
from dspark_lightning.pretrained import load_draft_weights, load_pretrained_draft
from dspark_lightning.rope import rope_errors
from dspark_lightning.serving.engines import engine_limits
from helpers import seeded, tiny_qwen3, tiny_qwen3_config

ARGS = {"mask_token_id": 96, "num_draft_layers": 2, "block_size": 4, "num_anchors": 3, "markov_rank": 8}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
FILES = ["README.md", "config.json", "dspark.json", "model.safetensors"]
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no heads": {"markov_rank": 0, "confidence_head_alpha": 0.0},
    "plain confidence": {"confidence_head_with_markov": False},
    "chosen layers": {"target_layer_ids": [-1, 2, 5]},
}
quiet = pytest.mark.filterwarnings("ignore:.*(SGLang|vLLM|llama)")


def make_draft(seed: int = 0, rope: dict[str, Any] | None = None, **changes: Any) -> DSparkDraft:
    config = tiny_qwen3_config(rope_parameters=rope) if rope else tiny_qwen3_config()
    with seeded(seed):
        return build_draft_model(config, **{**ARGS, **changes})


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_config(folder: Path, config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported vanilla draft."""
    return export_draft(make_draft(), tmp_path / "my-dspark")


@quiet
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_equal(variant: str, tmp_path: Path) -> None:
    draft = make_draft(**VARIANTS[variant])
    folder = export_draft(draft, tmp_path / "a-dspark")
    loaded = load_pretrained_draft(folder)
    rounded = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
    assert type(loaded) is type(draft) and not loaded.training
    assert same_tensors(loaded.state_dict(), rounded)
    again = export_draft(loaded, tmp_path / "b-dspark")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_the_file_holds_flat_bf16_tensors_with_embedding_and_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == make_draft().state_dict().keys()
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"} <= weights.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in folder.iterdir()) == FILES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_targets_weights_are_written_twice(dtype: torch.dtype, tmp_path: Path) -> None:
    target, draft = tiny_qwen3(tie_word_embeddings=True).to(dtype), make_draft()
    draft.initialize_embeddings_and_head(embed_tokens=target.get_input_embeddings(), lm_head=target.lm_head)
    weights = load_file(export_draft(draft, tmp_path / "dspark") / "model.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], weights["lm_head.weight"])
    assert torch.equal(weights["lm_head.weight"], target.lm_head.weight.bfloat16())


def test_a_loaded_draft_gives_the_same_logits(tmp_path: Path) -> None:
    draft = make_draft().bfloat16().eval()
    loaded = load_pretrained_draft(export_draft(draft, tmp_path / "dspark"))
    ids = torch.arange(12).unsqueeze(0)
    with seeded(0):
        given = {"input_ids": ids, "target_hidden_states": torch.randn(1, 12, 64), "loss_mask": torch.ones_like(ids)}
    anchors = {"anchor_positions": torch.tensor([[2, 5]]), "block_keep_mask": torch.tensor([[True, True]])}
    assert torch.equal(draft(**given, **anchors).draft_logits, loaded(**given, **anchors).draft_logits)
    assert rope_errors(loaded) == []


def test_a_loaded_drafts_embedding_and_head_are_frozen(folder: Path) -> None:
    frozen = {name for name, p in load_pretrained_draft(folder).named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def test_config_fields(folder: Path) -> None:
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": [1, 3],
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "num_target_layers": 6,
        "num_hidden_layers": 2,
        "num_anchors": 3,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3], "block_size": 4},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "head_dim": 16,
        "hidden_size": 32,
        "vocab_size": 97,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    config = read_config(folder)
    assert {name: config[name] for name in expected} == expected
    assert "mrope" not in json.dumps(config)


@quiet
def test_fields_are_written_without_heads_too(tmp_path: Path) -> None:
    config = read_config(export_draft(make_draft(markov_rank=0, confidence_head_alpha=0.0), tmp_path / "dspark"))
    assert config["markov_rank"] == 0 and config["enable_confidence_head"] is False
    assert config["confidence_head_with_markov"] is False and "markov_head_type" in config


@quiet
def test_layer_ids_of_embedding_and_last_layer(tmp_path: Path) -> None:
    config = read_config(export_draft(make_draft(target_layer_ids=[-1, 2, 5]), tmp_path / "dspark"))
    assert config["target_layer_ids"] == [-1, 2, 5]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]


def test_both_rope_schemas_are_written(tmp_path: Path) -> None:
    config = read_config(export_draft(make_draft(rope=YARN), tmp_path / "dspark"))
    assert config["rope_parameters"] == YARN
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in YARN.items() if k != "rope_theta"}


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 1e6}], ids=["yarn", "default"])
@pytest.mark.parametrize("dropped", [("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_either_rope_schema_is_enough(rope: dict[str, Any], dropped: tuple[str, ...], tmp_path: Path) -> None:
    draft = make_draft(rope=rope)
    folder = export_draft(draft, tmp_path / "dspark")
    write_config(folder, {k: v for k, v in read_config(folder).items() if k not in dropped})
    loaded = load_pretrained_draft(folder)
    assert torch.equal(loaded.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
    assert loaded.rotary_emb.attention_scaling == draft.rotary_emb.attention_scaling


def test_config_is_plain_json(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((folder / "config.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("changes", "engines"),
    [
        ({}, []),
        ({"target_layer_ids": [-1, 2]}, ["SGLang"]),
        ({"target_layer_ids": [2, 5]}, ["SGLang"]),
        ({"markov_rank": 0}, ["SGLang", "llama.cpp"]),
        ({"markov_rank": 0, "confidence_head_alpha": 0.0}, ["SGLang"]),
        ({"markov_head_type": "gated"}, ["vLLM"]),
        ({"markov_head_type": "rnn"}, ["vLLM"]),
        ({"confidence_head_with_markov": False}, ["llama.cpp"]),
        ({"confidence_head_with_markov": False, "confidence_head_alpha": 0.0}, []),
    ],
)
def test_engine_limits(changes: dict[str, Any], engines: list[str], tmp_path: Path) -> None:
    draft = make_draft(**changes)
    lines = [limit.line for limit in engine_limits(draft.config)]
    assert [line.split()[0] for line in lines] == engines
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_draft(draft, tmp_path / "dspark")
    assert [str(warning.message) for warning in caught] == lines


@pytest.mark.parametrize("name", ["draft", "dflash", "dspark-dflash", "DFlash-DSpark"])
def test_names_that_engines_would_misread(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must contain 'dspark' and not 'dflash'") as error:
        export_draft(make_draft(), tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["dspark", "qwen3-4b-DSpark", "my_dspark_v2"])
def test_names_that_tell_the_method(name: str, tmp_path: Path) -> None:
    assert check_export_path(str(tmp_path / name)) == tmp_path / name


def test_only_the_last_part_of_the_path_is_the_name(tmp_path: Path) -> None:
    assert export_draft(make_draft(), tmp_path / "dflash" / "new" / "dspark").is_dir()
    with pytest.raises(ValueError, match="'model'"):
        check_export_path(tmp_path / "dspark" / "model")


def test_an_existing_folder_is_replaced_as_a_whole(folder: Path) -> None:
    export_draft(make_draft(seed=1), folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert torch.equal(load_pretrained_draft(folder).fc.weight, make_draft(seed=1).fc.weight.bfloat16())
    assert list(folder.parent.iterdir()) == [folder]


def fail(*_: object, **__: object) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("failing", ["write_tensors", "write_about", "replace_path"])
def test_a_failure_leaves_the_old_folder_and_nothing_else(
    failing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no space left"):
        patch.setattr(export, failing, fail)
        export_draft(make_draft(seed=1), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_could_not_be_served_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    right = export.serving_config
    monkeypatch.setattr(export, "serving_config", lambda draft: right(draft) | {"sample_from_anchor": False})
    with pytest.raises(ValueError, match="anchors: sample_from_anchor is False, must be True"):
        export_draft(make_draft(seed=1), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_remains_of_a_killed_export_do_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if the process had died before cleaning up
    with pytest.raises(ValueError), monkeypatch.context() as patch:
        patch.setattr(export, "write_tensors", fail)
        export_draft(make_draft(seed=1), folder)
    monkeypatch.undo()
    export_draft(make_draft(seed=2), folder)
    assert torch.equal(load_pretrained_draft(folder).fc.weight, make_draft(seed=2).fc.weight.bfloat16())
    assert list(folder.parent.iterdir()) == [folder]


def assert_refused(path: Path, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        load_pretrained_draft(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert_refused(folder, name)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"\xff\xfe\x00", b'"text"'])
def test_a_corrupt_config_is_named(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, r"config\.json")


@pytest.mark.parametrize("keep", [0, 5, 1000, -3])
def test_corrupt_weights_are_named(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(folder, r"model\.safetensors")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "dspark", "dspark")


def test_a_file_in_place_of_the_folder(folder: Path) -> None:
    assert_refused(folder / "config.json", "config")


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids", "markov_rank", "num_anchors"])
def test_a_config_without_a_field_we_need(name: str, folder: Path) -> None:
    write_config(folder, {k: v for k, v in read_config(folder).items() if k != name})
    assert_refused(folder, name)


@pytest.mark.parametrize("architectures", [None, [], ["Qwen3ForCausalLM"]])
def test_a_config_of_something_else(architectures: list[str] | None, folder: Path) -> None:
    write_config(folder, {**read_config(folder), "architectures": architectures})
    assert_refused(folder, "known are .*Qwen3DSparkModel")


@pytest.mark.parametrize(
    ("name", "shape"), [("fc.weight", (3, 3)), ("markov_head.markov_w2.weight", None), ("stranger.weight", (1,))]
)
def test_weights_that_do_not_fit_are_named(name: str, shape: tuple[int, ...] | None, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    if shape is not None:
        weights[name] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors")
    assert_refused(folder, name.replace(".", r"\."))


def test_a_file_without_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")
    assert_refused(folder, str(folder))


def test_starting_weights_leave_the_targets_embedding(folder: Path) -> None:
    target, draft = tiny_qwen3(seed=7), make_draft(seed=1)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    draft.initialize_embeddings_and_head(embed_tokens=embed, lm_head=head)
    before = embed.weight.clone(), head.weight.clone()
    load_draft_weights(draft, folder)
    assert torch.equal(embed.weight, before[0]) and torch.equal(head.weight, before[1])
    assert draft.embed_tokens.weight.data_ptr() == embed.weight.data_ptr()
    exported = load_file(folder / "model.safetensors")
    for name, tensor in draft.state_dict().items():
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            assert_close(tensor, exported[name].float(), rtol=0, atol=0)
    assert draft.fc.weight.dtype == torch.float32 and draft.fc.weight.requires_grad


def test_starting_weights_must_fit(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has target_layer_ids \[1, 3\], this draft has \[0, 1, 2\]"):
        load_draft_weights(make_draft(target_layer_ids=[0, 1, 2]), folder)
    wider = build_draft_model(tiny_qwen3_config(intermediate_size=72), **ARGS)
    with pytest.raises(ValueError, match=r"'layers\.0\.mlp\.down_proj\.weight' has shape .* the draft needs"):
        load_draft_weights(wider, folder)


def write_checkpoint(path: Path, **changes: Any) -> Path:
    draft = make_draft()
    state = {f"draft.{name}": tensor for name, tensor in draft.state_dict().items()}
    identity = {"draft_config": draft.config.to_dict(), "target": "org/name", "target_fingerprint": "0"}
    checkpoint = {"dspark": identity, "state_dict": state, **changes}
    torch.save({key: value for key, value in checkpoint.items() if value is not None}, path)
    return path


def test_a_draft_from_a_checkpoint(tmp_path: Path) -> None:
    loaded, target = load_checkpoint_draft(write_checkpoint(tmp_path / "x.ckpt"))
    assert target == "org/name"
    assert same_tensors(loaded.state_dict(), make_draft().state_dict())
    assert loaded.config.to_dict() == make_draft().config.to_dict() and not loaded.training


@pytest.mark.parametrize("changes", [{"dspark": None}, {"dspark": {}}, {"state_dict": None}, {"state_dict": {}}])
def test_a_checkpoint_of_something_else(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.ckpt") as error:
        load_checkpoint_draft(write_checkpoint(tmp_path / "x.ckpt", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 7, 0.5])
def test_a_broken_checkpoint(keep: float, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.ckpt")
    content = path.read_bytes()
    path.write_bytes(content[: math.floor(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"x\.ckpt") as error:
        load_checkpoint_draft(path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "exploded",)

    torch.save({"dspark": Bomb()}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        load_checkpoint_draft(tmp_path / "x.ckpt")
    assert not (tmp_path / "exploded").exists()

"""What a feature cache was made from: every field counts, and only what changes features or rows."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.features.fingerprint import (
    Fingerprint,
    check_fingerprint,
    config_digest,
    files_digest,
    template_fields,
)
from helpers import tiny_qwen3, tiny_qwen3_config

MADE = Fingerprint("c", "w", "f", [1, 3], "n", "t", "j", "o", 128, {"train": "a", "val": "b"})
OTHER: dict[str, Any] = {"target_layer_ids": [1, 2], "max_length": 64, "data": {"train": "a", "val": "z"}}


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_each_field_that_differs_is_refused_with_both_values(name: str) -> None:
    other = OTHER.get(name, "other")
    check_fingerprint(MADE, MADE, Path("cache"))
    check_fingerprint(replace(MADE, **{name: None}), MADE, Path("cache"))  # not known in this run

    with pytest.raises(ValueError) as error:
        check_fingerprint(replace(MADE, **{name: other}), MADE, Path("cache"))

    assert str(error.value) == (
        f"the feature cache 'cache' was made with {name} {getattr(MADE, name)!r}, this run has {other!r}: use the "
        "settings it was made with, or precompute into another folder"
    )


def test_a_cache_is_the_same_wherever_the_files_of_the_target_are() -> None:
    assert replace(MADE, target_files=None).identity() == MADE.identity()
    assert replace(MADE, data={"train": "z"}).identity() != MADE.identity()


def test_how_a_target_is_loaded_does_not_count_but_its_shape_does() -> None:
    loaded, config = tiny_qwen3().config, tiny_qwen3_config()
    loaded._attn_implementation, loaded._name_or_path = "eager", "elsewhere"

    assert config_digest(loaded) == config_digest(config)
    assert config_digest(tiny_qwen3_config(rms_norm_eps=1e-5)) != config_digest(config)


def test_template_and_options_are_told_apart() -> None:
    tokenizer = load_tokenizer("embedded")
    plain = template_fields(ChatRenderer(tokenizer))
    changes = {
        "chat_template": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        "template_options": {"template_kwargs": {"enable_thinking": False}},
    }
    for field, options in changes.items():
        other = template_fields(ChatRenderer(tokenizer, **options))  # type: ignore[arg-type]
        assert [name for name in plain if other[name] != plain[name]] == [field]
    assert template_fields(ChatRenderer(tokenizer, supervise_roles=["assistant", "user"])) != plain
    tokenizer.add_special_tokens({"eos_token": "<|user|>"})
    assert template_fields(ChatRenderer(tokenizer))["tokenizer"] != plain["tokenizer"]


def test_weight_files_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    for name, change in (("one", 0), ("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        changed = bytes((byte + change) % 256 for byte in content)
        (tmp_path / name / "model.safetensors").write_bytes(changed)
    digests = [files_digest(str(tmp_path / name)) for name in ("one", "same", "other")]

    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "none").mkdir()
    assert files_digest(str(tmp_path / "none")) is None
    assert files_digest("nobody/has-this-model") is None

"""The configurations named after a model carry the settings that were published for it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parent.parent / "configs"
# Draft layers, block size, anchors, row length, feature layers, mask token.
PUBLISHED: dict[str, tuple[int, int, int, int, list[int], int]] = {
    "qwen3_0.6b": (5, 7, 512, 4096, [1, 7, 14, 21, 26], 151669),
    "qwen3_4b": (5, 7, 512, 4096, [1, 9, 17, 25, 33], 151669),
    "qwen3_8b": (5, 7, 512, 4096, [1, 9, 17, 25, 33], 151669),
    "qwen3_14b": (5, 7, 512, 4096, [1, 10, 19, 28, 37], 151669),
    "gemma4_12b": (5, 7, 512, 4096, [5, 17, 29, 41, 46], 4),
    "gemma4_31b": (5, 7, 128, 2048, [7, 22, 37, 52, 58], 4),
    "deepseek_v4_flash": (2, 5, 512, 4096, [39, 40, 41], 128799),
    "glm_5_2": (3, 5, 512, 4096, [75, 76, 77], 154856),
    "kimi_k3": (3, 5, 512, 4096, [90, 91, 92], 163605),
    "minimax_m3": (5, 7, 512, 4096, [10, 22, 34, 46, 58], 128799),
}
OPTIMIZER = {
    "minimax_m3": (1e-5, 0.0, 1.0),  # constant
    "qwen3_4b": (6e-4, 0.04, 0.0),
    "qwen3_8b": (6e-4, 0.04, 0.0),
    "qwen3_14b": (6e-4, 0.04, 0.0),
}


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return loaded


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_and_layers(name: str) -> None:
    model, data = (config(name)[part]["init_args"] for part in ("model", "data"))
    keys = ("num_draft_layers", "block_size", "num_anchors", "target_layer_ids", "mask_token_id")
    layers, block, anchors, length, ids, mask = PUBLISHED[name]
    assert [model[key] for key in keys] == [layers, block, anchors, ids, mask]
    assert data["max_length"] == length and model["markov_rank"] == 256


@pytest.mark.parametrize("name", PUBLISHED)
def test_optimizer(name: str) -> None:
    settings = config(name)
    model = settings["model"]["init_args"]
    optimizer = model["optimizer"]["init_args"]
    lr, warmup, floor = OPTIMIZER.get(name, (6e-4, 0.04, 0.1))
    assert (optimizer["lr"], model["warmup_ratio"], model["min_lr_ratio"]) == (lr, warmup, floor)
    assert optimizer["weight_decay"] == 0.0 and settings["trainer"]["gradient_clip_val"] == 1.0


def test_no_model_is_left_out() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*PUBLISHED, "quickstart", "quickstart_vlm", "smollm2"}

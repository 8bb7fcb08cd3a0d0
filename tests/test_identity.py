"""A checkpoint is refused where it does not fit the run."""

from typing import Any

import pytest

from dspark_lightning.drafts.registry import build_draft_config
from dspark_lightning.identity import check_identity
from helpers import tiny_qwen3_config

ARGS = {"mask_token_id": 96, "num_draft_layers": 2, "block_size": 4, "markov_rank": 8}


def identity(target: str = "org/name", fingerprint: str = "ab12", **changes: Any) -> dict[str, Any]:
    config = build_draft_config(tiny_qwen3_config(), {**ARGS, **changes})
    return {"target": target, "target_fingerprint": fingerprint, "draft_config": config.to_dict()}


@pytest.mark.parametrize("changes", [{}, {"target": "/moved/elsewhere"}, {"num_anchors": 9}])
def test_what_may_change(changes: dict[str, Any]) -> None:
    check_identity(identity(), identity(**changes))


def test_other_weights_of_the_target_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'org/old' \(weights cd34\).*'org/name' \(weights ab12\)") as error:
        check_identity(identity(), identity("org/old", "cd34"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mask_token_id": 5}, "mask_token_id 5, this run has 96"),
        ({"block_size": 7}, "block_size 7, this run has 4"),
        ({"target_layer_ids": [0, 4]}, r"target_layer_ids \[0, 4\], this run has \[1, 3\]"),
        ({"num_draft_layers": 3, "target_layer_ids": [1, 3]}, "layers 3, this run has 2"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "markov_rank 0, this run has 8"),
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn', this run has 'vanilla'"),
        ({"confidence_head_alpha": 0.0}, "False, this run has True"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov False, this run has True"),
    ],
)
def test_another_shape_is_refused_with_both_values(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        check_identity(identity(), identity(**changes))
    assert "\n" not in str(error.value)

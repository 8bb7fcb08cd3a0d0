"""A draft in a folder, whatever its layout, with the config and under the names of our own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark_lightning.features.hashing import weights_hash
from dspark_lightning.layouts.dflash import DFLASH
from dspark_lightning.layouts.files import CONFIG, WEIGHTS, read_json_object, read_weights
from dspark_lightning.layouts.flat import FLAT, WEIGHTS_HASH, known_drafts
from dspark_lightning.layouts.layout import Config, Layout, Weights
from dspark_lightning.layouts.speculators import SPECULATORS
from dspark_lightning.typed_json import build

_LAYOUTS = (SPECULATORS, FLAT, DFLASH)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Needed:
    """What every own config has to say."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_target_layers: int | None
    num_anchors: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool


@dataclass(frozen=True)
class SavedDraft:
    """A draft in a folder."""

    path: Path
    layout: Layout
    config: Config
    """The own one."""
    tied: bool
    """Whether the embedding is the head, too, where the file has no head."""
    hash: str | None
    """What the weights have to have; None where another trainer wrote them."""

    def weights(self) -> Weights:
        """Read the tensors, under the names of the draft.

        Raises:
            ValueError: they cannot be read, are quantised, or hold NaN or infinite values.
        """
        weights = read_weights(self.path)
        try:
            weights = self.layout.own_weights(weights)
        except ValueError as error:
            raise ValueError(f"{str(self.path / WEIGHTS)!r} {error}") from error
        for name, tensor in weights.items():
            if tensor.dtype not in _DTYPES:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"{name!r} of the draft in {str(self.path)!r} is {dtype}, must be bfloat16 or float32")
            if not tensor.isfinite().all():
                raise ValueError(f"{name!r} of the draft in {str(self.path)!r} holds NaN or infinite values")
        if self.tied and "embed_tokens.weight" in weights:
            weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
        return weights


def check_weights_hash(written: str | None, weights: Mapping[str, Tensor], path: Path) -> None:
    """Check weights against the hash in their folder's config, None where another trainer wrote it.

    Raises:
        ValueError: they are not those that were exported.
    """
    if written not in (None, weights_hash(weights)):
        raise ValueError(
            f"{str(path / WEIGHTS)!r} is damaged, its weights are not those that were exported: export it again, or, "
            f"if you changed them, take {WEIGHTS_HASH} out of its {CONFIG}"
        )


def read_draft_config(path: Path) -> Config:
    """Read the config.json of a draft folder, as it stands there.

    Raises:
        ValueError: it is missing, cannot be read, or holds no object.
    """
    if not (path / CONFIG).is_file():
        hint = ""
        if path.is_file():
            hint = " (a checkpoint? write its draft with dspark export)"
        elif (path / "dspark-draft" / CONFIG).is_file():
            hint = f" (there is one in {str(path / 'dspark-draft')!r})"
        raise ValueError(f"{str(path)!r} is no folder with an exported draft: it has no {CONFIG}{hint}")
    return read_json_object(path / CONFIG)


def open_saved_draft(path: Path) -> SavedDraft:
    """Read the config of a draft folder, and leave its weights on disk.

    Raises:
        ValueError: no such folder, or a config that cannot be read or used.
    """
    config = read_draft_config(path)
    try:
        layout = _layout_of(config)
        own = layout.own_config(config)
        build(_Needed, own)
        if own.get("model_type") == "qwen3" and "sliding_attention" in str(own.get("layer_types")):
            raise ValueError("has layer_types with 'sliding_attention': a draft layer sees its whole context")
    except ValueError as error:
        raise ValueError(f"{str(path / CONFIG)!r} {error}") from error
    return SavedDraft(
        path,
        layout,
        own | {"tie_word_embeddings": False},
        own.get("tie_word_embeddings") is True,
        config.get(WEIGHTS_HASH),
    )


def _layout_of(config: Config) -> Layout:
    for layout in _LAYOUTS:
        if layout.recognises(config):
            return layout
    found = f"architectures {config['architectures']!r}" if "architectures" in config else "no architectures"
    known = "; ".join(layout.mark for layout in _LAYOUTS)
    classes = ", ".join(known_drafts())
    raise ValueError(f"is of no known layout, it has {found}: known are {known}; draft classes are {classes}")

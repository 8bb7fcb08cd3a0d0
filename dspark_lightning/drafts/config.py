"""From a target's config and the model arguments to a draft's config: what all families do alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PretrainedConfig

from dspark_lightning.heads import MARKOV_HEADS
from dspark_lightning.target import build_target_layer_ids, validate_target_layer_ids


@dataclass(frozen=True, kw_only=True)
class DraftArgs:
    """The model arguments of a draft, under the same names everywhere.

    Raises:
        ValueError: a value out of range; one line that names it.
    """

    mask_token_id: int
    """Token whose embedding fills the slots to predict. No default: it must never occur in the data."""
    num_draft_layers: int = 5
    """Decoder layers of the draft."""
    block_size: int = 7
    """Tokens proposed per block, K."""
    num_anchors: int = 512
    """Blocks trained per row, N."""
    markov_rank: int = 256
    """Rank of the Markov head; 0 leaves it out (the DFlash baseline)."""
    markov_head_type: str = "vanilla"
    """vanilla, gated or rnn."""
    confidence_head_with_markov: bool = True
    """Whether the confidence head also reads the previous token's Markov embedding."""
    confidence_head_alpha: float = 1.0
    """Weight of the confidence loss; 0 leaves the head out."""
    target_layer_ids: Sequence[int] | None = None
    """Feature layers of the target; None spreads num_draft_layers of them."""

    def __post_init__(self) -> None:
        for name, least in (("num_draft_layers", 1), ("block_size", 1), ("num_anchors", 1), ("markov_rank", 0)):
            value = getattr(self, name)
            if not _is_integer(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not _is_integer(self.mask_token_id):
            raise ValueError(f"mask_token_id must be an integer, got {self.mask_token_id!r}")
        ids = self.target_layer_ids
        if ids is not None and not (isinstance(ids, Sequence) and all(_is_integer(i) for i in ids)):
            raise ValueError(f"target_layer_ids must be a list of integers, got {ids!r}")
        if self.markov_head_type not in MARKOV_HEADS:
            kinds = ", ".join(MARKOV_HEADS)
            raise ValueError(f"markov_head_type must be one of {kinds}, got {self.markov_head_type!r}")
        if not 0 <= self.confidence_head_alpha < float("inf"):
            raise ValueError(f"confidence_head_alpha must be 0 or positive, got {self.confidence_head_alpha}")

    @classmethod
    def of(cls, model_args: Any) -> "DraftArgs":
        """Read the arguments from a mapping (unknown keys are refused) or from the attributes of any object.

        Raises:
            ValueError: an unknown key, mask_token_id missing, or a value out of range.
        """
        names = [field.name for field in fields(cls)]
        if isinstance(model_args, cls):
            return model_args
        if isinstance(model_args, Mapping):
            unknown = sorted(set(model_args) - set(names))
            if unknown:
                raise ValueError(f"unknown draft argument {unknown[0]!r}: known are {', '.join(names)}")
            given = dict(model_args)
        else:
            given = {name: getattr(model_args, name) for name in names if hasattr(model_args, name)}
        if given.get("mask_token_id") is None:
            raise ValueError("mask_token_id is not set: give the id of a token that never occurs in the data")
        return cls(**given)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shared_draft_fields(text_config: PretrainedConfig, args: DraftArgs, architecture: str) -> dict[str, Any]:
    """Config fields that every draft adds to its family's backbone fields.

    Args:
        text_config: the target's text config.
        args: model arguments.
        architecture: class name of the draft.

    Raises:
        ValueError: mask_token_id outside the vocabulary, or wrong target_layer_ids.
    """
    if not 0 <= args.mask_token_id < text_config.vocab_size:
        raise ValueError(
            f"mask_token_id {args.mask_token_id} lies outside the target's vocabulary, "
            f"must be in 0..{text_config.vocab_size - 1}"
        )
    num_target_layers = text_config.num_hidden_layers
    if args.target_layer_ids is None and args.num_draft_layers >= max(num_target_layers, 2):
        raise ValueError(
            f"num_draft_layers {args.num_draft_layers} asks for as many feature layers, but the target has only "
            f"{num_target_layers} layers: set target_layer_ids, or num_draft_layers to less"
        )
    if args.target_layer_ids is None:
        layer_ids = build_target_layer_ids(num_target_layers, args.num_draft_layers)
    else:
        layer_ids = validate_target_layer_ids(args.target_layer_ids, num_target_layers)
    return {
        "architectures": [architecture],
        "num_target_layers": num_target_layers,
        "num_hidden_layers": args.num_draft_layers,
        "block_size": args.block_size,
        "mask_token_id": args.mask_token_id,
        "target_layer_ids": layer_ids,
        "num_anchors": args.num_anchors,
        "enable_confidence_head": args.confidence_head_alpha > 0,
        "confidence_head_with_markov": args.confidence_head_with_markov and args.markov_rank > 0,
        "markov_rank": args.markov_rank,
        "markov_head_type": args.markov_head_type,
        "tie_word_embeddings": False,
    }


def text_config_of(target_config: PretrainedConfig, text_model_types: Sequence[str]) -> PretrainedConfig:
    """Take the config of the text model out of a multimodal target's config; a text-only one is returned as it is.

    Args:
        target_config: the target's Hugging Face config.
        text_model_types: the `model_type` of the text models that the family's draft fits.

    Raises:
        ValueError: the target wraps a text model of another type.
    """
    text = target_config.get_text_config()
    if text is not target_config and text.model_type not in text_model_types:
        raise ValueError(
            f"no draft serves a {target_config.model_type!r} target around a text model of type {text.model_type!r}: "
            f"known are {', '.join(text_model_types)}"
        )
    return text


# What describes the target's weights, not its shape, and lists with an entry for each of the target's layers.
_NOT_INHERITED = {
    *("_name_or_path", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype", "transformers_version"),
    *("indexer_types", "layer_types", "mlp_layer_types", "per_layer_config"),
}


def inherited_fields(text_config: PretrainedConfig) -> dict[str, Any]:
    """Fields of the target's text config that a draft config of the same class takes over."""
    fields = {name: value for name, value in text_config.to_dict().items() if name not in _NOT_INHERITED}
    return fields | {"pad_token_id": inside_vocabulary(text_config.pad_token_id, text_config.vocab_size)}


def inside_vocabulary(token_id: int | None, vocab_size: int) -> int | None:
    """The id, or None where it lies outside: some configs pad with such an id, which no embedding takes."""
    return token_id if token_id is not None and 0 <= token_id < vocab_size else None

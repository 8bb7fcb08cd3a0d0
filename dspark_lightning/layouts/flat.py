"""The flat layouts: the one exported by default, and that of DeepSpec and NeMo Automodel.

Both have the draft's fields at the top of config.json and its tensors under the draft's own names. The default adds
what serving engines look for.
"""

from dspark_lightning.drafts.registry import DSPARK_DRAFT_REGISTRY
from dspark_lightning.layouts.from_target import settled
from dspark_lightning.layouts.layout import Config, Layout

WEIGHTS_HASH = "weights_hash"
"""Field of an exported config.json; drafts of other trainers have none."""
_NOT_THE_DRAFTS = (
    *("eagle_aux_hidden_state_layer_ids", "sample_from_anchor", "dspark_bonus_anchor", "dflash_config"),
    WEIGHTS_HASH,
)
"""Fields of an exported config.json that are no part of the draft's config: for engines, and about the file."""


def deepspec_config(own: Config) -> Config:
    """From an exported config.json to DeepSpec's."""
    return {name: value for name, value in own.items() if name not in _NOT_THE_DRAFTS}


def check_first_slot(config: Config) -> None:
    """Refuse a draft whose blocks begin elsewhere: slot k of ours predicts the k + 1-st token behind the anchor.

    Raises:
        ValueError: sample_from_anchor is there, and not true.
    """
    value = config.get("sample_from_anchor", True)
    if value is not True:
        raise ValueError(f"has sample_from_anchor {value!r}: the first slot of a block predicts too, so must be true")


def _own_config(config: Config) -> Config:
    check_first_slot(config)
    # Where there is no such head, its fields may be missing.
    may_be_missing = {"markov_head_type": "vanilla", "confidence_head_with_markov": False, "num_target_layers": None}
    return settled(may_be_missing | deepspec_config(config))


def known_drafts() -> list[str]:
    """The names of the draft classes."""
    return sorted({spec.model_class.__name__ for spec in DSPARK_DRAFT_REGISTRY.values()})


def _names_a_draft(config: Config) -> bool:
    architectures, known = config.get("architectures"), known_drafts()
    return (
        isinstance(architectures, list)
        and all(isinstance(name, str) for name in architectures)
        and any(name in known for name in architectures)
    )


FLAT = Layout(
    mark="dspark and deepspec (architectures names a draft class)",
    recognises=_names_a_draft,
    own_config=_own_config,
)

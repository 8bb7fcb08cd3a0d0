"""What can be told from the folder alone."""

from collections.abc import Callable
from pathlib import Path

from transformers import PretrainedConfig

from dspark_lightning.layouts.files import WEIGHTS
from dspark_lightning.layouts.flat import WEIGHTS_HASH
from dspark_lightning.layouts.saved import check_weights_hash
from dspark_lightning.serving.engines import Engine, engine_limits
from dspark_lightning.serving.fields import serving_config
from dspark_lightning.serving.findings import Verdict, error, first_difference, ok, skipped, warning
from dspark_lightning.serving.folder import DraftFolder, read_folder, stored_tensors
from dspark_lightning.target import validate_target_layer_ids


def check_name(path: Path) -> Verdict:
    """Engines tell the method by the folder's name."""
    name = path.resolve().name
    if "dspark" not in name.lower() or "dflash" in name.lower():
        return error(f"the folder is named {name!r}, must contain 'dspark' and not 'dflash': engines go by it")
    return ok(f"{name!r} contains 'dspark' and not 'dflash'")


def check_files(folder: DraftFolder) -> Verdict:
    """Engines load every file of weights they find."""
    weights = [*folder.path.glob("*.safetensors"), *folder.path.glob("*.safetensors.index.json")]
    others = sorted(path.name for path in weights if path.name != WEIGHTS)
    if others:
        return error(f"{others[0]!r} lies beside {WEIGHTS!r}, must not: engines load all weights they find")
    problem = first_difference(folder.config, {"model_type": type(folder.draft.config).model_type})
    return problem or ok(f"{len(folder.tensors)} tensors in {WEIGHTS}, a {type(folder.draft).__name__}")


def check_tensors(folder: DraftFolder) -> Verdict:
    """Names, shapes and dtypes are those that the config asks for."""
    needed = {name: tuple(tensor.shape) for name, tensor in folder.draft.state_dict().items()}
    for name in sorted(needed.keys() | folder.tensors.keys()):
        if name not in folder.tensors:
            return error(f"{name!r} is missing, must be there with shape {needed[name]}")
        if name not in needed:
            return error(f"{name!r} is there, must not: the config asks for no such tensor")
        found = folder.tensors[name]
        if found.shape != needed[name]:
            return error(f"{name!r} has shape {found.shape}, the config asks for {needed[name]}")
        if found.dtype != "bfloat16":
            return error(f"{name!r} is {found.dtype}, must be bfloat16")
    declared = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    return first_difference(folder.config, declared) or ok(f"{len(needed)} tensors in bfloat16, as the config asks")


def check_layer_ids(folder: DraftFolder) -> Verdict:
    """Feature layers rise, lie inside the target, and stand in all three places, in the convention of each."""
    count = folder.draft.config.num_target_layers
    ids = list(folder.draft.target_layer_ids)
    try:
        validate_target_layer_ids(ids, max(ids, default=0) + 1 if count is None else count)
    except ValueError as refusal:
        return error(str(refusal))
    aux = [i + 1 for i in ids]
    problem = first_difference(folder.config, {"eagle_aux_hidden_state_layer_ids": aux})
    if problem is None and count is None:
        return warning(f"{ids}, of a target whose number of layers is not known: num_target_layers is null")
    return problem or ok(f"{ids} of {count} layers, {aux} for engines that count from 1")


def check_anchors(folder: DraftFolder) -> Verdict:
    """The block's first token is sampled from the anchor's slot."""
    right = {"sample_from_anchor": True, "dspark_bonus_anchor": False}
    problem = first_difference(folder.config, right)
    return problem or ok("sample_from_anchor is True, dspark_bonus_anchor is False")


def check_dflash_config(folder: DraftFolder) -> Verdict:
    """The nested fields repeat those at the top, and say nothing about anchors."""
    nested, right = folder.config.get("dflash_config"), serving_config(folder.draft)["dflash_config"]
    if not isinstance(nested, dict):
        return error(f"dflash_config is {nested!r}, must be {right}")
    if "sample_from_anchor" in nested:
        return error(f"dflash_config has sample_from_anchor {nested['sample_from_anchor']!r}, must not have it")
    problem = first_difference(nested, right)
    return ok(f"{right}") if problem is None else error(f"dflash_config: {problem.line}")


def check_mask_token(folder: DraftFolder) -> Verdict:
    """The mask token has an embedding."""
    mask, vocabulary = folder.draft.mask_token_id, folder.draft.config.vocab_size
    if not 0 <= mask < vocabulary:
        return error(f"mask_token_id is {mask!r}, must lie in 0..{vocabulary - 1}")
    return ok(f"{mask} of a vocabulary of {vocabulary}")


def check_rope(folder: DraftFolder) -> Verdict:
    """Both ways to write RoPE say the same, and what the draft's family computes."""
    config, right = folder.config, serving_config(folder.draft)
    own = folder.draft.rope_parameters
    multiaxis = sorted(key for key in own if key.startswith("mrope"))
    if multiaxis:
        return error(f"rope_parameters has {multiaxis[0]}, must not: a draft sees text positions only")
    if own and not config.get("rope_parameters"):
        return error(f"rope_parameters is missing, must be {right['rope_parameters']!r}")
    names = [name for name in ("rope_theta", "rope_scaling") if name in right]
    for name in {"rope_theta", "rope_scaling"} - set(names):
        if config.get(name) is not None:
            return error(f"{name} is {config[name]!r}, must not be there beside a table for each kind of layer")
    problem = first_difference(config, {name: right[name] for name in names})
    if problem is not None:
        source = "rope_parameters says so" if own else f"a {type(folder.draft).__name__} has no RoPE"
        return error(f"{problem.line}: {source}")
    return ok(f"rope_theta {right['rope_theta']}, type {own.get('rope_type', 'default')}" if own else "no RoPE")


def check_confidence_head(folder: DraftFolder) -> Verdict:
    """The head reads what the config says."""
    config = folder.draft.config
    if not config.enable_confidence_head:
        return skipped("the draft has none (enable_confidence_head is False)")
    if "confidence_head_with_markov" not in folder.config:
        return error("confidence_head_with_markov is missing, must be true or false")
    with_markov, hidden, rank = config.confidence_head_with_markov, config.hidden_size, config.markov_rank
    if with_markov and not rank:
        return error("confidence_head_with_markov is True, must be False: markov_rank is 0")
    width = hidden + rank if with_markov else hidden
    reason = f"hidden_size {hidden}" + (f" and markov_rank {rank}" if with_markov else "")
    stored = folder.tensors.get("confidence_head.proj.weight")
    found = None if stored is None else stored.shape[-1]
    if found != width:
        return error(f"it reads {found} inputs, must read {width} ({reason})")
    return ok(f"it reads {width} inputs ({reason})")


def check_values(folder: DraftFolder) -> Verdict:
    """No NaN and no infinite value, and all as exported; reads all weights."""
    weights = dict(stored_tensors(folder.path))
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return error(f"{name!r} holds NaN or infinite values, must be finite")
    if WEIGHTS_HASH not in folder.config:
        return ok(f"all values are finite; without {WEIGHTS_HASH} nobody knows whether they are those exported")
    try:
        check_weights_hash(folder.config[WEIGHTS_HASH], weights, folder.path)
    except ValueError as refusal:
        return error(str(refusal))
    return ok("all values are finite, and those that were exported")


def engine_check(engine: Engine, wanted: bool) -> Callable[[DraftFolder], Verdict]:
    """The check of one engine's limits: an error where it is the engine that will serve, else a warning."""

    def check(folder: DraftFolder) -> Verdict:
        lines = [limit.line for limit in engine_limits(folder.draft.config) if engine in limit.engines]
        if lines:
            return (error if wanted else warning)("; ".join(lines))
        return ok(f"nothing known against {_kind(folder.draft.config)}")

    return check


def _kind(config: PretrainedConfig) -> str:
    """The parts that engines differ about."""
    head = f"a {config.markov_head_type} Markov head of rank {config.markov_rank}" if config.markov_rank else "no head"
    return f"{head}, features of layers {config.target_layer_ids}"


HEADER_CHECKS: dict[str, Callable[[DraftFolder], Verdict]] = {
    "files": check_files,
    "tensors": check_tensors,
    "layer ids": check_layer_ids,
    "anchors": check_anchors,
    "dflash_config": check_dflash_config,
    "mask token": check_mask_token,
    "RoPE": check_rope,
    "confidence head": check_confidence_head,
}
"""Those that read no weights, by name."""


def check_header(path: Path) -> None:
    """Check a folder that was just written, without reading its weights.

    Raises:
        ValueError: it would not be served; names the check.
    """
    folder = read_folder(path)
    for name, check in HEADER_CHECKS.items():
        outcome, line = check(folder)
        if outcome == "error":
            raise ValueError(f"the draft cannot be served as it would be written, {name}: {line}")

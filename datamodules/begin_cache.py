"""Beginning a feature cache for the rows of a datamodule, or going on with the one that is there."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.utilities import rank_zero_info
from transformers import AutoConfig, PretrainedConfig

from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.tokenizer import padding_token_id
from dspark_lightning.delivery import all_or_none, process_rank
from dspark_lightning.features.cache import FeatureCache, check_cache_folder, create_cache
from dspark_lightning.features.estimate import bytes_per_token, check_size
from dspark_lightning.features.fingerprint import (
    NORM,
    Fingerprint,
    check_fingerprint,
    config_digest,
    files_digest,
    rows_digest,
    template_fields,
)
from dspark_lightning.features.manifest import SplitSize, has_manifest, new_manifest
from dspark_lightning.features.stored_target import save_target_parts
from dspark_lightning.loading import target_source
from dspark_lightning.replace import alone_in, check_folder
from dspark_lightning.sharding import full_state_dict
from dspark_lightning.target import HFDSparkTargetModel

if TYPE_CHECKING:
    from dspark_lightning.module import DSparkModule


def open_or_begin(folder: Path, source: ChatDataModule, module: "DSparkModule", limit_gb: float | None) -> FeatureCache:
    """The cache in a folder; where there is none, one without features. Every rank has to call this.

    Args:
        folder: of the cache.
        source: set up; gives the rows.
        module: configured, with its target.
        limit_gb: what the whole cache may take, in 10^9 bytes.

    Raises:
        ValueError: the cache there was made for something else, the folder is another's, or there is no room; before
            anything is written.
    """
    weights = full_state_dict(module.draft)  # type: ignore[arg-type]  # with the help of all ranks
    all_or_none(lambda: _open_or_begin(folder, source, module, weights, limit_gb) if process_rank() == 0 else None)
    return all_or_none(lambda: FeatureCache(folder))


def _open_or_begin(
    folder: Path, source: ChatDataModule, module: "DSparkModule", weights: Mapping[str, Any], limit_gb: float | None
) -> None:
    check_folder(folder)
    check_cache_folder(folder)
    target = module.target
    if target is None:  # the cache is complete
        return
    known = replace(
        known_of_target(module.hparams),
        target_config=config_digest(target.model.config),
        target_weights=module.identity()["target_fingerprint"],
        target_layer_ids=list(target.target_layer_ids),
    )
    fingerprint = fingerprint_of(source, known)
    if not has_manifest(folder) and _begin(folder, source, module, weights, fingerprint, limit_gb):
        return
    cache = FeatureCache(folder)
    check_fingerprint(fingerprint, cache.manifest.fingerprint, folder)
    to_write = {split: cache.rows(split).lengths()[cache.missing(split)] for split in cache.splits}
    rank_zero_info(check_size(folder, cache.manifest, sum(int(x.sum()) for x in to_write.values()), limit_gb))


def _begin(
    folder: Path,
    source: ChatDataModule,
    module: "DSparkModule",
    weights: Mapping[str, Any],
    fingerprint: Fingerprint,
    limit_gb: float | None,
) -> bool:
    """Write all but the features; False where another process was quicker."""
    target = cast(HFDSparkTargetModel, module.target)
    tokens = {split: SplitSize(len(rows), int(rows.lengths().sum())) for split, rows in source.row_sets.items()}
    hidden = target.model.config.get_text_config().hidden_size
    per_token = bytes_per_token(len(target.target_layer_ids), hidden)
    pad = padding_token_id(source.renderer.tokenizer)
    manifest = new_manifest(module.hparams["target"], fingerprint, tokens, per_token, pad)
    rank_zero_info(check_size(folder, manifest, sum(size.tokens for size in tokens.values()), limit_gb))
    parts = (target.model.config, weights["embed_tokens.weight"], weights["lm_head.weight"])
    with alone_in(folder):
        if has_manifest(folder):
            return False
        save_target_parts(folder, manifest.owner, *parts)
        create_cache(folder, manifest, source.row_sets)
    return True


def fingerprint_of(source: ChatDataModule, known: Fingerprint) -> Fingerprint:
    """What a run's features depend on.

    Args:
        source: set up.
        known: what is known of the target.
    """
    return replace(
        known,
        **template_fields(source.renderer),
        max_length=source.max_length,
        data={split: rows_digest(rows) for split, rows in source.row_sets.items()},
    )


def known_of_target(hparams: Mapping[str, Any]) -> Fingerprint:
    """What the files of a module's target tell about it, without loading it."""
    target, gguf_file = hparams.get("target"), hparams.get("gguf_file")
    trusted = bool(hparams.get("trust_remote_code", False))
    config = None if target is None or gguf_file is not None else _local_config(target, trusted)
    return Fingerprint(
        target_config=None if config is None else config_digest(config),
        target_files=None if target is None else files_digest(target, gguf_file),
        norm=NORM,
    )


def _local_config(target: str, trust_remote_code: bool) -> PretrainedConfig | None:
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(target_source(target), **options)  # type: ignore[no-any-return]
    except (OSError, ValueError):  # not on this machine
        return None

"""`dspark precompute`: fill a feature cache, so that training need not run the target."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from dspark_lightning.datamodules import CachedFeatureDataModule, ChatDataModule, HybridFeatureDataModule
from dspark_lightning.features.cache import FeatureCache

_NO_TRAINING = (  # nothing of a fit but the devices and the precision
    "--trainer.logger=false",
    "--trainer.callbacks=null",
    "--trainer.enable_checkpointing=false",
    "--trainer.use_distributed_sampler=false",
)

_DESCRIPTION = """Run the target once over all rows of a configuration and store its features.

The configuration is the one that dspark fit takes, --data.init_args.train_data and other overrides included. What the
cache holds already is not computed again, so a run that was stopped goes on where it was; damaged files are named and
made anew. Under several devices each writes files of its own, and a target that does not fit on one is split by the
strategy of the configuration."""


def precompute(args: Sequence[str], build: Callable[[list[str]], LightningCLI]) -> None:
    """Fill a feature cache.

    Args:
        args: the command line behind `dspark precompute`.
        build: makes trainer, module and datamodule from what is left of it.

    Raises:
        ValueError: no cache is named, or the datamodule has no rows of its own to compute features for.
    """
    parser = argparse.ArgumentParser(
        "dspark precompute", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", metavar="DIR", help="folder of the cache; begun where there is none")
    parser.add_argument("--limit_gb", type=float, help="what the whole cache may take; default: what is free")
    own, rest = parser.parse_known_args(args)
    cli = build([*rest, *_NO_TRAINING])
    datamodule = filling(cli.datamodule, own.cache, own.limit_gb)
    cli.trainer.predict(cli.model, datamodule=datamodule, return_predictions=False)
    cli.trainer.strategy.barrier()
    if cli.trainer.is_global_zero:
        print(_summary(Path(datamodule.cache)))


def filling(datamodule: LightningDataModule, cache: str | None, limit_gb: float | None) -> HybridFeatureDataModule:
    """The datamodule that fills a cache with the features of another one's rows.

    Args:
        datamodule: of the configuration.
        cache: folder; not needed where the datamodule names it.
        limit_gb: likewise.

    Raises:
        ValueError: no cache is named, or the datamodule has no rows of its own.
    """
    if isinstance(datamodule, HybridFeatureDataModule):
        return HybridFeatureDataModule(
            datamodule.source, cache or datamodule.cache, datamodule.limit_gb if limit_gb is None else limit_gb
        )
    if not isinstance(datamodule, ChatDataModule) or isinstance(datamodule, CachedFeatureDataModule):
        raise ValueError(
            f"data is a {type(datamodule).__name__}, which has no rows to compute features for: give the "
            "ChatDataModule or VLMDataModule that training would use"
        )
    if cache is None:
        raise ValueError("cache is not set: give --cache, the folder to fill")
    return HybridFeatureDataModule(datamodule, cache, limit_gb)


def _summary(folder: Path) -> str:
    cache = FeatureCache(folder)
    rows = sum(size.rows for size in cache.manifest.splits.values())
    return (
        f"Feature cache {folder} is complete: {rows:,} rows\n"
        "Next: dspark fit --config ... --data dspark_lightning.datamodules.CachedFeatureDataModule "
        f"--data.init_args.cache {folder}"
    )

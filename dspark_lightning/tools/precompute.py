"""`dspark precompute`: fill a feature cache, so that training need not run the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from dspark_lightning.datamodules import CachedFeatureDataModule, ChatDataModule, HybridFeatureDataModule
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.usage import OwnOptions

_NO_TRAINING = (  # nothing of a fit but the devices and the precision
    "--trainer.logger=false",
    "--trainer.callbacks=null",
    "--trainer.enable_checkpointing=false",
    "--trainer.use_distributed_sampler=false",
)

_DESCRIPTION = """Run the target once over all rows of a configuration and store its features. What the cache holds
already is not computed again, so a run that was stopped goes on where it was; damaged files are named and made anew.
Each of several devices writes files of its own; a target too big for one is split by the configuration's strategy."""


@dataclass(frozen=True)
class Filling:
    """What is to be filled."""

    cache: str | None  # folder; None where the configuration names it
    limit_gb: float | None


def parse_filling(args: Sequence[str]) -> tuple[Filling, list[str]]:
    """Take this command's own options out of a command line; the rest is that of `dspark fit`.

    Raises:
        ValueError: an option that cannot be used.
    """
    parser = OwnOptions(
        "dspark precompute",
        description=_DESCRIPTION,
        epilog="All other options are those of `dspark fit`: --config my.yaml --data.init_args.max_length 512 ...",
        allow_abbrev=False,
    )
    parser.add_argument("--cache", metavar="DIR", help="folder of the cache; begun where there is none")
    parser.add_argument("--limit_gb", type=float, help="what the whole cache may take; default: what is free")
    own, rest = parser.parse_known_args(args)
    return Filling(own.cache, own.limit_gb), [*rest, *_NO_TRAINING]


def precompute(cli: LightningCLI, filling: Filling) -> None:
    """Fill a feature cache.

    Args:
        cli: with trainer, module and datamodule.
        filling: what is to be filled.

    Raises:
        ValueError: no cache is named, the datamodule has no rows of its own to compute features for, or rows were held
            back.
    """
    datamodule = filling_datamodule(cli.datamodule, filling)
    cli.trainer.predict(cli.model, datamodule=datamodule, return_predictions=False)
    cli.trainer.strategy.barrier()
    if cli.trainer.is_global_zero:
        print(_summary(Path(datamodule.cache)))


def filling_datamodule(datamodule: LightningDataModule, filling: Filling) -> HybridFeatureDataModule:
    """The datamodule that fills a cache with the features of another one's rows.

    Args:
        datamodule: of the configuration.
        filling: what is to be filled; goes before what the datamodule says.

    Raises:
        ValueError: no cache is named, or the datamodule has no rows of its own.
    """
    cache, limit_gb = filling.cache, filling.limit_gb
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
    if not cache.complete:
        raise ValueError(
            f"the feature cache {str(folder)!r} is incomplete, it lacks {cache.lacks()}: run dspark precompute without "
            "trainer.limit_predict_batches and trainer.fast_dev_run"
        )
    rows = sum(size.rows for size in cache.manifest.splits.values())
    return (
        f"Feature cache {folder} is complete: {rows:,} rows\n"
        "Next: dspark fit --config ... --data dspark_lightning.datamodules.CachedFeatureDataModule "
        f"--data.init_args.cache {folder}"
    )

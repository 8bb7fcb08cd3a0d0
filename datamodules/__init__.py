"""LightningDataModules that feed a drafter's training."""

from dspark_lightning.datamodules.chat import ChatDataModule

__all__ = ["ChatDataModule"]

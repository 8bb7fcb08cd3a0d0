"""LightningDataModules that feed a drafter's training."""

from dspark_lightning.datamodules.cached import CachedFeatureDataModule
from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.hybrid import HybridFeatureDataModule
from dspark_lightning.datamodules.vlm import VLMDataModule

__all__ = ["CachedFeatureDataModule", "ChatDataModule", "HybridFeatureDataModule", "VLMDataModule"]

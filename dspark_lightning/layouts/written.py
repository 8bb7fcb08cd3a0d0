"""The layouts that a draft can be exported in: they differ in config.json, the tensors have the same names in all."""

from typing import Literal, get_args

from dspark_lightning.layouts.flat import deepspec_config
from dspark_lightning.layouts.layout import Config
from dspark_lightning.layouts.speculators import speculators_config

ExportLayout = Literal["dspark", "deepspec", "speculators"]


def written_config(own: Config, layout: ExportLayout, target: str | None) -> Config:
    """The config.json of a draft in a layout.

    Args:
        own: that of the default layout.
        layout: dspark is the default; deepspec is what DeepSpec and NeMo Automodel read.
        target: folder or hub id, for speculators, which names it.

    Raises:
        ValueError: an unknown layout, or one that cannot hold this draft.
    """
    if layout == "dspark":
        return own
    if layout == "deepspec":
        return deepspec_config(own)
    if layout == "speculators":
        return speculators_config(own, target)
    raise ValueError(f"there is no layout {layout!r} to export: known are {', '.join(get_args(ExportLayout))}")

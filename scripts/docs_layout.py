"""A hook of mkdocs: shows the package as it is installed to the tool that reads its docstrings.

That tool imports nothing, so it knows no more of callbacks/ and datamodules/ at the top of the checkout than mypy does.
"""

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

from typecheck import link_installed_layout

_scratch = tempfile.TemporaryDirectory(prefix="dspark-docs-")


@event_priority(100)  # before the tool reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Have docstrings read from a scratch tree of links laid out like the wheel.

    Args:
        config: of mkdocs.
    """
    link_installed_layout(Path(_scratch.name))
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_scratch.name]
    return config


def on_shutdown() -> None:
    """Remove the tree."""
    _scratch.cleanup()

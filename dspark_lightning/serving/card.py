"""The model card of an exported draft: README.md, as the Hugging Face hub shows it."""

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PretrainedConfig

import dspark_lightning
from dspark_lightning.replace import write_text
from dspark_lightning.serving.engines import ENGINES, engine_limits, serve_commands
from dspark_lightning.serving.record import RECORD_FILE, ExportRecord

CARD_FILE = "README.md"
_TAGS = ["dspark", "speculative-decoding", "draft-model"]


def model_card(name: str, config: PretrainedConfig, record: ExportRecord) -> str:
    """Write the card; what the record does not hold is left out.

    Args:
        name: of the folder, which the commands name.
        config: of the draft.
        record: of the export.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    limits = engine_limits(config)
    commands = serve_commands(Path(name), record.target or "TARGET", config.block_size)
    engines = [
        (label, command, [limit.line for limit in limits if engine in limit.engines])
        for (engine, label), command in zip(ENGINES.items(), commands.values(), strict=True)
    ]
    return environment.get_template("card.md.jinja").render(
        front_matter=yaml.safe_dump(_front_matter(record), sort_keys=False).strip(),
        name=name,
        config=config,
        record=record,
        engines=engines,
        version=dspark_lightning.__version__,
    )


def write_about(folder: Path, config: PretrainedConfig, record: ExportRecord, name: str) -> None:
    """Write the record of an export, and the model card that tells of it.

    Args:
        folder: of the export.
        config: of the draft.
        record: of the export.
        name: that the folder has, or will have.

    Raises:
        ValueError: one of them cannot be written; names it.
    """
    write_text(folder / RECORD_FILE, record.text())
    write_text(folder / CARD_FILE, model_card(name, config, record))


def card_target(folder: Path) -> str | None:
    """The target that the card of a draft's folder names in its front matter; None where there is none."""
    try:
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
        front = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    base = front.get("base_model") if isinstance(front, dict) else None
    first = base[0] if isinstance(base, list) and base else base
    return first if isinstance(first, str) else None


def _front_matter(record: ExportRecord) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "dspark-lightning", "tags": _TAGS}
    if record.target is not None and _is_hub_id(record.target):
        front["base_model"] = record.target
    return front


def _is_hub_id(target: str) -> bool:
    """Whether a target is one of the hub's, the only kind that front matter may name."""
    return target.count("/") == 1 and not target.startswith((".", "~", "/")) and not Path(target).exists()

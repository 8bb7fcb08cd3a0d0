"""One row with pictures: the conversation as the chat template wants it, and the pictures in their order.

A part {"type": "image"} of a turn brings its picture along, under `image`, `path`, `bytes` or `base64`; where it does
not, it takes the next one of the row's own list, `images` (or the one under `image`), as data sets keep them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from dspark_lightning.datamodules.images import load_image
from dspark_lightning.datamodules.rows import TURN_KEYS, BadRow, Chat, TokenRow, parse_row

_SOURCES = {"image": ("image", "path", "bytes", "base64"), "video": ("video", "path")}


@dataclass(frozen=True)
class VlmChat:
    """A conversation whose contents are text or lists of parts, with the media that its parts stand for."""

    chat: Chat
    images: list[Image.Image] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)


def parse_vlm_row(record: object, folder: Path | None = None) -> VlmChat:
    """Bring one record with pictures into normal form. Formats: see `dspark_lightning.datamodules.rows`.

    Args:
        record: One row, as it was read.
        folder: Where relative paths of pictures start.

    Raises:
        BadRow: As `parse_row`; and a picture that is missing, left over or unreadable, or a part of an unknown type.
    """
    media: dict[str, list[Any]] = {"image": [], "video": []}
    waiting = _waiting_images(record)

    def read_content(content: object, role: str) -> Any:
        if isinstance(content, str):
            return content
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise BadRow(
                f"the content of the {role} turn must be text or a list of parts, got {content!r:.60}",
                "content is no text",
            )
        return [_read_part(part, role, media, waiting, folder) for part in content]

    chat = parse_row(record, read_content)
    if isinstance(chat, TokenRow):
        raise BadRow("input_ids are not read here: a row with pictures must be a conversation", "unknown fields")
    left_over = len(list(waiting))
    if left_over:
        raise BadRow(
            f"the row has {left_over} pictures more than its turns have parts of type 'image'",
            "pictures and parts differ",
        )
    return VlmChat(chat, media["image"], media["video"])


def sources(record: object) -> Iterator[object]:
    """What the parts and the lists of a record give as pictures, without reading any."""
    if not isinstance(record, Mapping):
        return
    yield from _waiting_images(record)
    for key in TURN_KEYS:
        for turn in record.get(key) or ():
            parts = turn.get("content") if isinstance(turn, Mapping) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and part.get("type") == "image":
                    yield from (part[name] for name in _SOURCES["image"] if part.get(name) is not None)


def _waiting_images(record: object) -> Iterator[object]:
    if not isinstance(record, Mapping):
        return iter(())
    images = record.get("images")
    if images is None:
        images = [] if record.get("image") is None else [record["image"]]
    return iter(images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images])


def _read_part(
    part: object, role: str, media: dict[str, list[Any]], waiting: Iterator[object], folder: Path | None
) -> dict[str, Any]:
    """The part as the template is given it; its picture or video goes to `media`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "image", "video"):
        raise BadRow(f"the {role} turn has a part of type {kind!r}; known are text, image, video", "content is no text")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRow(f"the {role} turn has a text part without text", "content is no text")
        return {"type": "text", "text": part["text"]}
    if role == "assistant":
        raise BadRow(
            f"the assistant turn has a part of type {kind!r}, but a draft learns to write text only",
            "content is no text",
        )
    source = next((part[name] for name in _SOURCES[kind] if part.get(name) is not None), None)
    if kind == "image":
        source = next(waiting, None) if source is None else source
        if source is None:
            raise BadRow(
                f"picture {len(media['image']) + 1} of the row is missing: its part has none, nor has the row",
                "pictures and parts differ",
            )
        media["image"].append(load_image(source, folder))
    elif source is None:
        raise BadRow(f"the {role} turn has a video part without a video", "pictures and parts differ")
    else:
        media["video"].append(source)
    return {"type": kind}

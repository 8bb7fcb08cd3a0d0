"""Pictures from wherever a row keeps them, as RGB."""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from dspark_lightning.datamodules.rows import BadRow


def load_image(source: object, folder: Path | None = None) -> Image.Image:
    """Read one picture.

    Args:
        source: A PIL image; the bytes of an image file; its path; its content in base64, also as a data URI; or what
            `datasets` gives for an image column that is not decoded, {"bytes": ..., "path": ...}.
        folder: Where relative paths start.

    Returns:
        The picture in RGB. Transparent parts become white, as a viewer would show them on a page.

    Raises:
        BadRow: There is no picture there; says what was given.
    """
    if isinstance(source, Image.Image):
        return to_rgb(source)
    if isinstance(source, Mapping) and {"bytes", "path"} & source.keys():
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if isinstance(source, bytes | bytearray):
        return _decode(bytes(source), f"{len(source)} bytes")
    if isinstance(source, Path):
        source = str(source)
    if not isinstance(source, str):
        raise BadRow(f"an image must be a PIL image, a path, bytes or base64, got {type(source).__name__}")
    if source.startswith(("http://", "https://")):
        raise BadRow(f"the image {_short(source)!r} is a URL: download it and give its path, bytes or base64")
    if source.startswith("data:"):
        return _from_base64(source.partition(",")[2], source)
    path = (folder or Path()) / Path(source).expanduser() if len(source) < 4096 else None
    if path is not None and _is_file(path):
        try:
            return _decode(path.read_bytes(), f"the file {str(path)!r}")
        except OSError as error:
            raise BadRow(f"the image file {str(path)!r} cannot be read: {error.strerror or error}") from error
    if len(source) > 64 and Path(source[-8:]).suffix == "":  # too long for a name, and without a file's ending
        return _from_base64(source, source)
    raise BadRow(f"the image file {str(path or _short(source))!r} does not exist")


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, whatever its mode; transparency, also that of a palette, is laid over white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode.startswith("I;16"):  # which PIL would cut off at 255
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text that cannot be a path
        return False


def _from_base64(text: str, source: str) -> Image.Image:
    try:
        return _decode(base64.b64decode(text, validate=True), f"base64 {_short(source)!r}")
    except binascii.Error as error:
        raise BadRow(f"the image {_short(source)!r} is neither a file that exists nor base64: {error}") from error


def _decode(content: bytes, name: str) -> Image.Image:
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return to_rgb(image)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0] if not isinstance(error, UnidentifiedImageError) else "no known format"
        raise BadRow(f"the image in {name} cannot be read: {reason}") from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."

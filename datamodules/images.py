"""Pictures from wherever a row keeps them, as RGB."""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from PIL import Image, ImageOps, UnidentifiedImageError

from dspark_lightning.datamodules.rows import BadRow

_KIND = "unreadable picture"  # of the bad rows here


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
        raise BadRow(f"an image must be a PIL image, a path, bytes or base64, got {type(source).__name__}", _KIND)
    if source.startswith(("http://", "https://")):
        raise BadRow(f"the image {_short(source)!r} is a URL: download it and give its path, bytes or base64", _KIND)
    if source.startswith("data:"):
        return _from_base64(source.partition(",")[2], source)
    path = image_path(source, folder)
    if path is not None:
        try:
            return _decode(path.read_bytes(), f"the file {str(path)!r}")
        except OSError as error:
            raise BadRow(f"the image file {str(path)!r} cannot be read: {error.strerror or error}", _KIND) from error
    if len(source) > 64 and Path(source.rstrip()[-8:]).suffix == "":  # too long for a name, without a file's ending
        return _from_base64(source, source)
    raise BadRow(f"the image file {str((folder or Path()) / _short(source))!r} does not exist or is no file", _KIND)


def image_path(source: str, folder: Path | None = None) -> Path | None:
    """The file that a text names, relative to `folder`; None where there is none."""
    try:
        path = (folder or Path()) / Path(source).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # no path at all, too long for one, or of a user who does not exist
        return None


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB and upright, whatever its mode; transparency, also of a palette, is laid over white."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode.startswith("I;16"):  # which PIL would cut off at 255
        image = image.point(lambda value: value / 256).convert("L")
    elif image.mode in ("I", "F"):
        image = _to_eight_bits(image)
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Whole or broken numbers to 0..255: what lies in 0..1 or above 255 is scaled."""
    _, high = cast(tuple[float, float], image.getextrema())
    if image.mode == "F" and high <= 1:
        scale = 255.0
    else:
        scale = 1.0 if high <= 255 else 1 / 256 if high <= 65535 else 255 / high
    return image.point(lambda value: value * scale + 0).convert("L")


def _from_base64(text: str, source: str) -> Image.Image:
    try:
        return _decode(base64.b64decode("".join(text.split()), validate=True), f"base64 {_short(source)!r}")
    except binascii.Error as error:
        raise BadRow(
            f"the image {_short(source)!r} is neither a file that exists nor base64: {error}", _KIND
        ) from error


def _decode(content: bytes, name: str) -> Image.Image:
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return to_rgb(image)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0] if not isinstance(error, UnidentifiedImageError) else "no known format"
        raise BadRow(f"the image in {name} cannot be read: {reason}", _KIND) from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."

"""Pictures in every form a row may hold them."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dspark_lightning.datamodules.images import load_image, to_rgb
from dspark_lightning.datamodules.rows import BadRow

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture() -> Image.Image:
    image = Image.new("RGB", (6, 4), RED)
    image.putpixel((5, 3), BLUE)
    return image


def png(image: Image.Image | None = None) -> bytes:
    buffer = io.BytesIO()
    (image or picture()).save(buffer, "PNG")
    return buffer.getvalue()


def sources(folder: Path) -> dict[str, Any]:
    (folder / "a.png").write_bytes(png())
    text = base64.b64encode(png()).decode()
    return {
        "PIL": picture(),
        "bytes": png(),
        "bytearray": bytearray(png()),
        "path": folder / "a.png",
        "path as text": str(folder / "a.png"),
        "relative path": "a.png",
        "base64": text,
        "data URI": f"data:image/png;base64,{text}",
        "datasets, bytes": {"bytes": png(), "path": "elsewhere.png"},
        "datasets, path": {"bytes": None, "path": str(folder / "a.png")},
    }


@pytest.mark.parametrize("kind", sources(Path("/tmp")))
def test_every_form_gives_the_same_picture(kind: str, tmp_path: Path) -> None:
    image = load_image(sources(tmp_path)[kind], folder=tmp_path)
    assert image.mode == "RGB" and image.tobytes() == picture().tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "I;16", "F", "LAB", "HSV"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    source = picture().convert("L").convert(mode) if mode in ("I;16", "F") else picture().convert(mode)
    image = to_rgb(source)
    assert image.mode == "RGB" and image.size == (6, 4)


def test_sixteen_bits_become_eight() -> None:
    source = Image.new("I;16", (2, 1))
    source.putpixel((0, 0), 65535)
    source.putpixel((1, 0), 32768)
    assert [to_rgb(source).getpixel((x, 0)) for x in (0, 1)] == [(255,) * 3, (128,) * 3]


def test_a_photo_is_turned_upright() -> None:
    """Cameras store the picture as the chip saw it, and which way is up beside it."""
    image = Image.new("RGB", (6, 4), RED)
    exif = image.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert load_image(buffer.getvalue()).size == (4, 6)


@pytest.mark.parametrize(
    ("mode", "value", "grey"), [("I", 65535, 255), ("I", 200, 200), ("F", 1.0, 255), ("F", 100.0, 100)]
)
def test_numbers_of_other_ranges(mode: str, value: float, grey: int) -> None:
    assert to_rgb(Image.new(mode, (1, 1), value)).getpixel((0, 0)) == (grey,) * 3


def test_base64_with_line_breaks() -> None:
    assert load_image(base64.encodebytes(png() + b" " * 60).decode()).size == (6, 4)


def test_colours_survive_a_palette() -> None:
    assert to_rgb(picture().convert("P", palette=Image.Palette.ADAPTIVE)).getpixel((5, 3)) == BLUE


def transparent(mode: str) -> Image.Image:
    """Red, half of it see-through."""
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (*RED, 0))
    if mode == "P":
        image = Image.new("P", (2, 1))
        image.putpalette([*RED, *BLUE])
        image.putpixel((1, 0), 1)
        image.info["transparency"] = 1
        return image
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_transparent_parts_become_white(mode: str) -> None:
    image = load_image(png(transparent(mode)))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, (255, 255, 255)]


def test_grey_with_alpha() -> None:
    assert to_rgb(Image.new("LA", (1, 1), (10, 0))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no/such.png", r"the image file 'no/such\.png' does not exist"),
        ("https://example.org/a.png", r"'https://example\.org/a\.png' is a URL: download it"),
        (b"not an image", "the image in 12 bytes cannot be read: no known format"),
        (png()[:45], "the image in 45 bytes cannot be read"),
        ("~nosuchuser/a.png", "does not exist or is no file"),
        ("/tmp", "does not exist or is no file"),
        (7, "must be a PIL image, a path, bytes or base64, got int"),
        (None, "got NoneType"),
        ("data:image/png;base64,???", "neither a file that exists nor base64"),
        ("A" * 200, "the image in base64 'AAAA.*' cannot be read"),
        ({"bytes": None, "path": None}, "got NoneType"),
    ],
)
def test_what_is_no_picture_is_named(source: Any, complaint: str) -> None:
    with pytest.raises(BadRow, match=complaint) as error:
        load_image(source)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("hello")
    with pytest.raises(BadRow, match=r"the image in the file '.*a\.png' cannot be read: no known format"):
        load_image(str(tmp_path / "a.png"))

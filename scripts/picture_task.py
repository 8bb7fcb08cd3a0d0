"""Generated pictures with questions and answers: what the embedded target that reads pictures is trained on.

A picture is a grid of three by three cells, each of the size of one visual token, with a coloured shape or nothing in
it. An answer names what is seen along the way that the question asks for, in words of which hardly one can be guessed
without the picture.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from PIL import Image, ImageDraw

SIDE = 3  # of the grid, in cells
CELL = 20  # pixels
COLOURS = {
    "red": (215, 40, 40),
    "orange": (240, 140, 30),
    "yellow": (240, 225, 50),
    "green": (50, 150, 60),
    "blue": (45, 85, 205),
    "purple": (140, 50, 160),
    "white": (250, 250, 250),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
EMPTY = ("empty", "cell")  # of two words like the others, so that a word's place in an answer says which cell it names
EMPTY_SHARE = 0.1
MOST_EMPTY = 3  # cells of a picture
LINES = {
    **{f"the {name} row": [(i, k) for k in range(SIDE)] for i, name in enumerate(("top", "middle", "bottom"))},
    **{f"the {name} column": [(k, i) for k in range(SIDE)] for i, name in enumerate(("left", "middle", "right"))},
}
"""The cells (row, column) of every line, in the order in which they are named."""
PATHS = {
    "row by row": [LINES[f"the {name} row"] for name in ("top", "middle", "bottom")],
    "column by column": [LINES[f"the {name} column"] for name in ("left", "middle", "right")],
    "backwards": [LINES[f"the {name} row"][::-1] for name in ("bottom", "middle", "top")],
}

Cell = tuple[str, str]
"""Colour and shape, or `EMPTY`."""
Grid = list[list[Cell]]


@dataclass(frozen=True)
class Example:
    """A picture, what is in it, and a question with its right answer."""

    picture: Image.Image
    grid: Grid
    question: str
    answer: str


def examples(seed: int) -> Iterator[Example]:
    """Endless examples, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        grid = draw_grid(rng)
        question, answer = rng.choice(TASKS)(rng, grid)
        yield Example(paint(rng, grid), grid, question, answer)


def draw_grid(rng: random.Random) -> Grid:
    """What is in the cells of a picture, row by row."""
    while True:
        cells: list[Cell] = [
            EMPTY if rng.random() < EMPTY_SHARE else (rng.choice(list(COLOURS)), rng.choice(SHAPES))
            for _ in range(SIDE * SIDE)
        ]
        if cells.count(EMPTY) <= MOST_EMPTY:
            return [cells[start : start + SIDE] for start in range(0, len(cells), SIDE)]


def paint(rng: random.Random, grid: Grid) -> Image.Image:
    """Draw a picture: the background, every colour, size and place vary a little.

    The picture has a palette of at most ten colours, which keeps its file small.
    """
    picture = Image.new("P", (SIDE * CELL, SIDE * CELL))
    grey = rng.randint(165, 205)
    palette: list[tuple[int, ...]] = [(grey, grey, grey)]
    canvas = ImageDraw.Draw(picture)
    for i, j in chain.from_iterable(PATHS["row by row"]):
        colour, shape = grid[i][j]
        if (colour, shape) != EMPTY:
            radius = rng.randint(5, 7)
            slack = CELL // 2 - 1 - radius
            x, y = (CELL * k + CELL // 2 + rng.randint(-slack, slack) for k in (j, i))
            paint_shape(canvas, shape, x, y, radius, len(palette))
            palette.append(_shade(rng, COLOURS[colour]))
    picture.putpalette([channel for colour in palette for channel in colour])
    return picture


def paint_shape(canvas: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, ink: int) -> None:
    """Draw one shape about (x, y), `radius` pixels to each side."""
    left, right, top, bottom = x - radius, x + radius, y - radius, y + radius
    box, thin = (left, top, right, bottom), radius // 3
    if shape == "circle":
        canvas.ellipse(box, fill=ink)
    elif shape == "ring":
        canvas.ellipse(box, outline=ink, width=2)
    elif shape == "square":
        canvas.rectangle(box, fill=ink)
    elif shape == "triangle":
        canvas.polygon([(left, bottom), (right, bottom), (x, top)], fill=ink)
    elif shape == "diamond":
        canvas.polygon([(left, y), (x, top), (right, y), (x, bottom)], fill=ink)
    else:
        canvas.rectangle((left, y - thin, right, y + thin), fill=ink)
        canvas.rectangle((x - thin, top, x + thin, bottom), fill=ink)


def _shade(rng: random.Random, colour: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(min(max(channel + rng.randint(-12, 12), 0), 255) for channel in colour)


def describe(rng: random.Random, grid: Grid) -> tuple[str, str]:
    """All cells along one path."""
    path = rng.choice(list(PATHS))
    question = rng.choice(("Describe the picture {}.", "What do you see, {}?", "Name all things {}."))
    return question.format(path), _sentence(grid, PATHS[path], "things")


def colours_and_shapes(rng: random.Random, grid: Grid) -> tuple[str, str]:
    """The colours along one path and the shapes along another, in either order."""
    kinds = rng.sample(("colours", "shapes"), 2)
    paths = rng.choices(list(PATHS), k=2)
    question = rng.choice(("List the {} {}, then the {} {}.", "Which {} {}, and then which {} {}?"))
    sentences = [_sentence(grid, PATHS[path], kind) for kind, path in zip(kinds, paths, strict=True)]
    return question.format(kinds[0], paths[0], kinds[1], paths[1]), " ".join(sentences)


def lines(rng: random.Random, grid: Grid) -> tuple[str, str]:
    """All rows, or all columns, in any order."""
    kind = rng.choice(("row", "column"))
    names = [name for name in LINES if name.endswith(kind)]
    rng.shuffle(names)
    question = rng.choice(("Describe {}.", "What is in {}?"))
    return question.format(", then ".join(names)), _sentence(grid, [LINES[name] for name in names], "things")


TASKS: tuple[Callable[[random.Random, Grid], tuple[str, str]], ...] = (describe, colours_and_shapes, lines)


def _sentence(grid: Grid, places: list[list[tuple[int, int]]], kind: str) -> str:
    """What is at `places`, line after line."""

    def word(cell: Cell) -> str:
        return {"things": " ".join(cell), "colours": cell[0], "shapes": cell[1]}[kind]

    return "; ".join(" ".join(word(grid[i][j]) for i, j in line) for line in places) + "."

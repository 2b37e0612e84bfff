"""Draws the demo's images: 12 kinds of shape, as PNG and JPEG files in one folder for each class.

Everything but the shape is random, so that a network has to learn the shape. The same seed gives
the same images.
"""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw

SIDE_PX = 48
TRAIN_PER_CLASS = 200
HELD_OUT_PER_CLASS = 40

Point = tuple[float, float]
Colour = tuple[int, int, int]
Shape = Callable[[ImageDraw.ImageDraw, "Pose", Colour], None]


class Pose:
    """Maps unit coordinates into the image, by a random position, size and rotation."""

    def __init__(self, random: Random) -> None:
        self.radius_px = random.uniform(0.28, 0.42) * SIDE_PX
        self.x_px = SIDE_PX / 2 + random.uniform(-0.12, 0.12) * SIDE_PX
        self.y_px = SIDE_PX / 2 + random.uniform(-0.12, 0.12) * SIDE_PX
        self.turn = random.uniform(-0.3, 0.3)
        self.width_px = random.randint(3, 5)

    def __call__(self, x: float, y: float) -> Point:
        cos, sin = math.cos(self.turn) * self.radius_px, math.sin(self.turn) * self.radius_px
        return self.x_px + x * cos - y * sin, self.y_px + x * sin + y * cos

    def disc(self, x: float, y: float, radius: float) -> tuple[float, float, float, float]:
        (x_px, y_px), r_px = self(x, y), radius * self.radius_px
        return x_px - r_px, y_px - r_px, x_px + r_px, y_px + r_px


def _star(corners: int, inner: float) -> list[Point]:
    """A star's outline; with `inner` 1, a regular polygon of twice the corners."""
    angles = [math.pi * i / corners for i in range(2 * corners)]
    radii = [1.0, inner] * corners
    return [(r * math.sin(a), -r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]


_SQUARE = [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
_TRIANGLE = [(0.0, -1.0), (0.9, 0.7), (-0.9, 0.7)]
_STAR = _star(5, 0.4)


def _filled(outline: list[Point]) -> Shape:
    def shape(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
        draw.polygon([at(x, y) for x, y in outline], fill=colour)

    return shape


def _hollow(outline: list[Point]) -> Shape:
    def shape(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
        points = [at(x, y) for x, y in outline]
        draw.line([*points, points[0], points[1]], fill=colour, width=at.width_px, joint="curve")

    return shape


def _strokes(*lines: tuple[Point, Point]) -> Shape:
    def shape(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
        for start, end in lines:
            draw.line([at(*start), at(*end)], fill=colour, width=at.width_px)

    return shape


def _disc(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
    draw.ellipse(at.disc(0, 0, 0.9), fill=colour)


def _ring(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
    draw.ellipse(at.disc(0, 0, 0.95), outline=colour, width=at.width_px)


def _dots(draw: ImageDraw.ImageDraw, at: Pose, colour: Colour) -> None:
    for x in (-0.75, 0.0, 0.75):
        for y in (-0.75, 0.0, 0.75):
            draw.ellipse(at.disc(x, y, 0.22), fill=colour)


SHAPES: dict[str, Shape] = {
    "bars": _strokes(*(((x, -1), (x, 1)) for x in (-0.75, 0.0, 0.75))),
    "cross": _strokes(((-1, 0), (1, 0)), ((0, -1), (0, 1))),
    "disc": _disc,
    "dots": _dots,
    "frame": _hollow(_SQUARE),
    "ring": _ring,
    "rungs": _strokes(*(((-1, y), (1, y)) for y in (-0.75, 0.0, 0.75))),
    "saltire": _strokes(((-0.8, -0.8), (0.8, 0.8)), ((-0.8, 0.8), (0.8, -0.8))),
    "square": _filled(_SQUARE),
    "star": _filled(_STAR),
    "tent": _hollow(_TRIANGLE),
    "triangle": _filled(_TRIANGLE),
}


def _image(shape: Shape, random: Random) -> Image.Image:
    ground = [random.randrange(256) for _ in range(3)]
    colour = [random.randrange(256) for _ in range(3)]
    while sum(abs(a - b) for a, b in zip(ground, colour, strict=True)) < 200:
        colour = [random.randrange(256) for _ in range(3)]
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), (ground[0], ground[1], ground[2]))
    shape(ImageDraw.Draw(image), Pose(random), (colour[0], colour[1], colour[2]))
    noise = np.random.default_rng(random.getrandbits(64)).normal(0, 20, (SIDE_PX, SIDE_PX, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def write_images(folder: Path, *, seed: int = 1) -> int:
    """Half of the files are PNG, half JPEG. Returns their number."""
    random = Random(seed)  # noqa: S311 (not a secret)
    count = 0
    for part, per_class in (("train", TRAIN_PER_CLASS), ("val", HELD_OUT_PER_CLASS)):
        for name, shape in SHAPES.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(per_class):
                ending = "png" if number % 2 else "jpg"
                _image(shape, random).save(folder / part / name / f"{number:04}.{ending}")
                count += 1
    return count

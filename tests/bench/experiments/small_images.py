"""Makes the images of the accuracy study: small, of ten classes, and so noisy that no classifier is
always right.

An image has the pattern of its class at a random place, a fainter one of any class at another, and
noise. So a classifier must find the patterns, and no classifier is right about all images. The same
numbers give the same images on every machine with the same version of numpy.
"""

import io
import tarfile
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..inputs import MTIME_S

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

CLASSES = 10
SIDE = 16
CHANNELS = 3

_HEADER = b"P6\n%d %d\n255\n" % (SIDE, SIDE)  # of a PPM; the pixels follow, row by row
_PATTERN = 7  # the side of a pattern
_NOISE = 1.6  # standard deviation of the noise, in those of a pattern: full shuffle ends near 92 %
_CONTRAST, _CONTRAST_OTHER = (0.7, 1.3), (0.0, 0.6)
_KINDS, _KINDS_NOISE = 20, 0.6  # patterns of a class, and the noise, of images with a long tail
_GREY, _SCALE = 128, 28  # from noise and patterns to pixels


def labels_of(count: int) -> Labels:
    """The class of each of `count` images: one after the other, so all are equally frequent."""
    labels: Labels = np.arange(count) % CLASSES
    return labels


def made_images(count: int, seed: int) -> Pixels:
    """`count` images of the classes `labels_of(count)`: image, row, column, channel."""
    draw = np.random.default_rng(seed)
    labels = labels_of(count)
    pixels = draw.standard_normal((count, SIDE, SIDE, CHANNELS), np.float32) * np.float32(_NOISE)
    patterns = _patterns(CLASSES)
    return _shown(draw, pixels, patterns, labels, draw.integers(0, CLASSES, count))


def made_long_tail(count: int, seed: int) -> Pixels:
    """As `made_images`, with less noise, and classes of 20 patterns each, of which the nth is as
    frequent as 1/n: photographs, too, show a few kinds of a class often, and many rarely (Feldman,
    "Does Learning Require Memorization?", STOC 2020, section 1)."""
    draw = np.random.default_rng(seed)
    frequency = 1 / np.arange(1, _KINDS + 1)
    kinds = draw.choice(_KINDS, count, p=frequency / frequency.sum())
    noise = np.float32(_KINDS_NOISE)
    pixels = draw.standard_normal((count, SIDE, SIDE, CHANNELS), np.float32) * noise
    shown = labels_of(count) * _KINDS + kinds
    others = draw.integers(0, CLASSES * _KINDS, count)
    return _shown(draw, pixels, _patterns(CLASSES * _KINDS), shown, others)


def _shown(
    draw: np.random.Generator,
    pixels: npt.NDArray[np.float32],
    patterns: npt.NDArray[np.float32],
    own: Labels,
    others: Labels,
) -> Pixels:
    """Images of noise with a pattern of their own and a fainter one, each at a random place."""
    count = len(pixels)
    for shown, contrasts in ((own, _CONTRAST), (others, _CONTRAST_OTHER)):
        contrast = draw.uniform(*contrasts, count).astype(np.float32)
        rows, columns = draw.integers(0, SIDE - _PATTERN + 1, (2, count))
        added = patterns[shown] * contrast[:, None, None, None]
        for image in range(count):
            row, column = rows[image], columns[image]
            pixels[image, row : row + _PATTERN, column : column + _PATTERN] += added[image]
    made: Pixels = np.clip(_GREY + _SCALE * pixels, 0, 255).astype(np.uint8)
    return made


def _patterns(count: int) -> npt.NDArray[np.float32]:
    """`count` smooth random patterns, with mean 0 and deviation 1."""
    rough = np.random.default_rng(0).standard_normal((count, _PATTERN + 2, _PATTERN + 2, CHANNELS))
    for axis in (1, 2):
        rough = 0.25 * np.roll(rough, 1, axis) + 0.5 * rough + 0.25 * np.roll(rough, -1, axis)
    patterns = rough[:, 1:-1, 1:-1]
    patterns -= patterns.mean(axis=(1, 2, 3), keepdims=True)
    patterns /= patterns.std(axis=(1, 2, 3), keepdims=True)
    return patterns.astype(np.float32)


def path_of(number: int, label: int) -> str:
    """The path of an image, in a folder for each class, as `ImageFolder` wants it."""
    return f"class{label}/{number:06}.ppm"


def decoded(content: bytes | memoryview) -> Pixels:
    """The pixels of a PPM that `write_tar` wrote. Raises ValueError for another."""
    if bytes(content[: len(_HEADER)]) != _HEADER:
        raise ValueError("no image of this study")
    return np.frombuffer(content, np.uint8, offset=len(_HEADER)).reshape(SIDE, SIDE, CHANNELS)


def write_tar(file: BinaryIO, pixels: Pixels, order: Labels) -> None:
    """Write a tar of PPM files in this order, in which `put` packs them."""
    labels = labels_of(len(pixels))
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        for number in order.tolist():
            content = _HEADER + pixels[number].tobytes()
            member = tarfile.TarInfo(path_of(number, int(labels[number])))
            member.size, member.mode, member.mtime = len(content), 0o644, MTIME_S
            archive.addfile(member, io.BytesIO(content))

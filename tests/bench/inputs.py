"""Makes the fixed inputs of the bench: the same names and bytes in every run, on every machine.

Contents come from a seeded generator and cannot be compressed, so that no side gains by
compression. A folder of files gets its name only when it is complete; with `--keep` a later run
uses it again.
"""

import contextlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Indices: TypeAlias = npt.NDArray[np.int64]
Sums: TypeAlias = npt.NDArray[np.uint64]

MTIME_S = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of files, their size, and the number of folders, which have equally many files."""

    name: str
    files: int
    folders: int
    file_bytes: int

    @property
    def bytes(self) -> int:
        return self.files * self.file_bytes

    @property
    def files_per_folder(self) -> int:
        return self.files // self.folders

    def folder_names(self) -> list[str]:
        return [f"class{number:04}" for number in range(self.folders)]

    def file_names(self, folder: int) -> list[str]:
        """The names in one folder; they are unique in the whole dataset."""
        first = folder * self.files_per_folder
        return [f"image{number:07}.bin" for number in range(first, first + self.files_per_folder)]

    def paths(self) -> list[str]:
        folders = enumerate(self.folder_names())
        return [f"{name}/{file}" for number, name in folders for file in self.file_names(number)]

    def contents(self, folder: int) -> Bytes:
        generator = np.random.default_rng([self.files, self.file_bytes, folder])
        rows, size = self.files_per_folder, self.file_bytes
        return np.frombuffer(generator.bytes(rows * size), np.uint8).reshape(rows, size)

    def content_sum(self) -> int:
        return int(self.file_sums().sum())

    def check(self, *got: object) -> None:
        """Raise AssertionError if these are not the files, bytes and sum of all contents."""
        expected = (self.files, self.bytes, self.content_sum())
        assert got == expected, f"wrong contents were read: {got}, not {expected}"

    def file_sums(self) -> Sums:
        """The sum of each file, in the order of `paths`; cached, as large shapes take seconds."""
        return _file_sums(self)

    def scaled(self, divisor: int) -> "Shape":
        """The shape with `divisor` times fewer folders: to try the bench, not to measure."""
        folders = max(self.folders // divisor, 2)
        return replace(self, files=folders * self.files_per_folder, folders=folders)


@cache
def _file_sums(shape: Shape) -> Sums:
    assert shape.file_bytes % 8 == 0
    folders = range(shape.folders)
    return np.concatenate([shape.contents(n).view(np.uint64).sum(axis=1) for n in folders])


D4 = Shape("D4", 20_000, 100, 4096)
D4L = Shape("D4L", 200_000, 1_000, 4096)
D110 = Shape("D110", 10_000, 100, 110 * 1024)
D1M = Shape("D1M", 1_000_000, 1_000, 100)
N1M = Shape("N1M", 1_280_000, 1_000, 0)
F4G = Shape("F4G", 1, 1, 4 << 30)


def make(shape: Shape, under: Path) -> Path:
    """The folder with the files of a shape, which is made if it is missing."""
    folder = under / f"{shape.name}-{shape.files}-{shape.folders}-{shape.file_bytes}"
    if folder.exists():
        return folder
    unfinished = under / f"{folder.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for number, name in enumerate(shape.folder_names()):
        inside = unfinished / name
        inside.mkdir(parents=True)
        for file, content in zip(shape.file_names(number), shape.contents(number), strict=True):
            (inside / file).write_bytes(content.data)
    unfinished.rename(folder)
    return folder


def tar_stream(shape: Shape) -> Iterator[bytes]:
    """A tar of the shape's folders with empty files: about a second for a million, in pieces."""
    assert shape.file_bytes == 0
    for number, name in enumerate(shape.folder_names()):
        folder = tarfile.TarInfo(f"{name}/")
        folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, MTIME_S
        yield folder.tobuf(tarfile.USTAR_FORMAT)
        yield _headers([f"{name}/{file}" for file in shape.file_names(number)])
    yield bytes(2 * tarfile.BLOCKSIZE)


def pipe(pieces: Iterable[bytes], command: Sequence[str], **environment: str) -> int:
    """Write `pieces` to a program's stdin; returns its exit code, which shows the error if it
    closes early."""
    with subprocess.Popen(
        command, env=environment or None, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for piece in pieces:
                process.stdin.write(piece)
            process.stdin.close()
    return process.returncode


def _headers(paths: list[str]) -> bytes:
    """The tar headers of empty files with names of equal length, made from one header."""
    first = tarfile.TarInfo(paths[0])
    first.mode, first.mtime = 0o644, MTIME_S
    template = np.frombuffer(first.tobuf(tarfile.USTAR_FORMAT), np.uint8)
    headers = np.tile(template, (len(paths), 1))
    names = np.frombuffer("".join(paths).encode(), np.uint8).reshape(len(paths), -1)
    headers[:, : names.shape[1]] = names
    headers[:, 148:156] = ord(" ")  # the checksum counts its own field as spaces
    checksums = headers.sum(axis=1)
    for digit in range(6):  # six octal digits, NUL, space
        headers[:, 153 - digit] = ord("0") + (checksums >> (3 * digit)) % 8
    headers[:, 154] = 0
    return headers.tobytes()

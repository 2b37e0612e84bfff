"""Processes that commit to a metadata store, for tests that kill them or run many at once."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from diesel_fs.storage.metadata.store import MetadataStore
from tests.storage.metadata.batches import Chunk, Entry
from tests.storage.metadata.metadata_stores import IDENTITY

ENTRIES = 50
_TREE = Path(__file__).resolve().parents[3]


def overlapping(number: int, folders: int = 1) -> Chunk:
    """A chunk with paths that other numbers have too, and an extent of a file of two chunks."""
    extent = Entry(
        b"big%d" % (number // 2), 9, number=number % 2, extents=2, first=(number // 2, 0)
    )
    small = tuple(
        Entry(b"%d/%d" % (i % folders, number * 7 % 10 + i), number + i) for i in range(ENTRIES)
    )
    return Chunk(number, (extent, *small))


def start(
    opener: Callable[[str], MetadataStore],
    where: str | Path,
    numbers: Sequence[int],
    *before: str,
    at_once: int = 1,
    folders: int = 1,
) -> "subprocess.Popen[str]":
    """A process that commits `overlapping` chunks with these numbers, `at_once` in each commit, and
    prints number and version of those that are committed. `opener` is a function of a module;
    `before` are words before the command.
    """
    code = f"import sys; from {__name__} import commit_and_print; commit_and_print(*sys.argv[1:])"
    words = [opener.__module__, opener.__name__, str(where), ",".join(map(str, numbers))]
    command = [*before, sys.executable, "-c", code, *words, str(at_once), str(folders)]
    return subprocess.Popen(command, cwd=_TREE, stdout=subprocess.PIPE, text=True)


def commit_and_print(
    module: str, opener: str, where: str, numbers: str, at_once: str, folders: str
) -> None:
    """The program of `start`."""
    tried = list(map(int, numbers.split(",")))
    with closing(getattr(importlib.import_module(module), opener)(where)) as meta:
        for begin in range(0, len(tried), int(at_once)):
            group = tried[begin : begin + int(at_once)]
            chunks = (overlapping(number, int(folders)) for number in group)
            version = meta.commit(IDENTITY, *(chunk.batch() for chunk in chunks))
            print("\n".join(f"{number} {version}" for number in group), flush=True)


def acknowledged(output: str) -> list[tuple[int, int]]:
    """Numbers and versions of the commits that a process has printed, without half a line."""
    lines = [line.split() for line in output.splitlines()]
    return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]

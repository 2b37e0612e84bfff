"""Compiles and runs the C program that reads files one after the other (`reader.c`)."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
BATCH_FILES = 64
DEADLINE_S = 300.0  # an epoch takes seconds


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What the readers have read; `sum` adds all bytes as 64-bit words modulo 2^64.

    `seconds` is the time from the first open to the last close, which was at `end_s` of
    `time.monotonic()`. `walked` is the number of entries of the walk before.
    """

    files: int
    bytes: int
    sum: int
    seconds: float
    end_s: float
    walked: int


def compile_reader(folder: Path) -> Path:
    """Compile the program into `folder`, unless it is there already."""
    return compiled(SOURCE, folder)


def compiled(source: Path, folder: Path, *options: str) -> Path:
    """Compile a program of one C file into `folder`, unless it is there already."""
    program = folder / source.stem
    if not program.exists():
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O2", *options, "-o", str(program), str(source)]
        subprocess.run(command, check=True)
    return program


def write_list(paths: Iterable[str], file: Path) -> Path:
    """Write the list of files for a reader."""
    file.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    return file


def read_files(
    program: Path,
    list_file: Path,
    *,
    readers: int = 1,
    batch_files: int = BATCH_FILES,
    walk: Path | None = None,
    prefix: Sequence[str] = (),
) -> ReadReport:
    """Run readers that share a list in batches; they may walk a folder first. `prefix` stands
    before the command.

    Raises CalledProcessError if a file cannot be read, TimeoutExpired if it takes too long.
    """
    walked = [] if walk is None else ["-w", str(walk)]
    command = [*prefix, str(program), *walked, "-j", str(readers), "-b", str(batch_files)]
    command.append(str(list_file))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    return ReadReport(**json.loads(done.stdout))

"""The C program that reads files one after the other (`reader.c`), compiled by the bench."""

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a reader did; `sum` adds all bytes as 64-bit words modulo 2^64."""

    files: int
    bytes: int
    sum: int
    seconds: float


def compile_reader(folder: Path) -> Path:
    """The program, compiled into `folder` where it is not there yet."""
    program = folder / "reader"
    if not program.exists():
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def write_list(paths: Iterable[str], file: Path) -> Path:
    """Writes the list that a reader follows."""
    file.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    return file


def read_files(program: Path, list_file: Path) -> ReadReport:
    """Runs a reader over a list. Raises CalledProcessError where a file cannot be read."""
    command = [str(program), str(list_file)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return ReadReport(**json.loads(done.stdout))

"""The files of a task's dataset in tests: a file's path and bytes follow from its number.

Pure; used by the tests and by the programs that they run on nodes.
"""

import random
from pathlib import Path


def path(number: int) -> str:
    return f"d{number // 100:03}/f{number:05}"


def content(number: int) -> bytes:
    """Random bytes, which cannot be compressed; sizes differ between files."""
    return random.Random(number).randbytes(2_000 + number * 37 % 5_000)


def make(folder: Path, files: int) -> int:
    total = 0
    for number in range(files):
        place = folder / path(number)
        place.parent.mkdir(parents=True, exist_ok=True)
        total += place.write_bytes(content(number))
    return total

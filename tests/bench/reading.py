"""Reads lists of files: by the C reader (`reader.c`), which checks every byte, and by Python code
as people write it (`loops_program.py`), in any Python.

A list is mostly an epoch: all files of a shape, once, in some order. It is written before a dataset
is mounted, so that it is read right after mounting. A pause would affect the figures, since the
kernel may reclaim idle pages of its page cache.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .inputs import Shape

STOCK, SYSTEM_CALLS, PIECES = "open().read()", "os.open", "pieces of 1 MiB"
BATCH_FILES = 64
DEADLINE_S = 300.0  # an epoch takes seconds
READER = Path(__file__).with_name("reader.c")
_LOOPS = Path(__file__).with_name("loops_program.py")


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The result of readers. `sum` adds all bytes as 64-bit words modulo 2^64; loops of Python only
    count them.

    `seconds` is the time from the first open to the last close, which was at `end_s` of
    `time.monotonic()`. `walked` is the number of entries of the walk before.
    """

    files: int
    bytes: int
    seconds: float
    end_s: float
    walked: int
    sum: int = 0

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds


@dataclass(frozen=True, slots=True)
class Order:
    """A list of files to read, with the count, bytes and sum that a reader of all must get."""

    list_file: Path
    files: int
    bytes: int
    sum: int

    def check(self, report: ReadReport, *, with_sum: bool, walked: bool) -> None:
        """Raise AssertionError if a reader has read other data, or has not `walked` before."""
        got, wanted = (
            (each.files, each.bytes, each.sum if with_sum else 0) for each in (report, self)
        )
        assert got == wanted, f"other files or contents were read: {got}, not {wanted}"
        assert not walked or report.walked > self.files, f"{report.walked} entries were met"


def compiled(source: Path, folder: Path, *options: str) -> Path:
    """Compile a program of one C file into `folder`, unless it is there already."""
    program = folder / source.stem
    if not program.exists():
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O2", *options, "-o", str(program), str(source)]
        subprocess.run(command, check=True)
    return program


def write_list(paths: Iterable[str], file: Path) -> Path:
    file.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    return file


def random_order(
    shape: Shape, root: Path, seed: int, folder: Path, *, files: int | None = None
) -> Order:
    """A random order of a shape's files below `root`, or the first `files` of it; in `folder`."""
    paths, chosen = shape.paths(), np.random.default_rng(seed).permutation(shape.files)[:files]
    total = int(shape.file_sums()[chosen].sum())
    file = folder / f"random-{root.parent.name}-{root.name}-{seed}"  # roots may have one name
    write_list((f"{root}/{paths[at]}" for at in chosen.tolist()), file)
    return Order(file, len(chosen), len(chosen) * shape.file_bytes, total)


def whole_order(shape: Shape, root: Path, paths: Iterable[str], file: Path) -> Order:
    """All files of a shape below `root`, in the order of `paths`; the list is written to `file`."""
    write_list((f"{root}/{path}" for path in paths), file)
    return Order(file, shape.files, shape.bytes, shape.content_sum())


def read_files(
    program: Path,
    list_file: Path,
    *,
    readers: int = 1,
    batch_files: int = BATCH_FILES,
    walk: Path | None = None,
    prefix: Sequence[str] = (),
) -> ReadReport:
    """Run C readers that share a list in batches; they may walk a folder first. `prefix` stands
    before the command.

    Raises CalledProcessError if a file cannot be read, TimeoutExpired if it takes too long.
    """
    walked = [] if walk is None else ["-w", str(walk)]
    command = [*prefix, str(program), *walked, "-j", str(readers), "-b", str(batch_files)]
    command.append(str(list_file))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    return ReadReport(**json.loads(done.stdout))


@contextmanager
def waiting_loop(
    python: str, order: Order, loop: str, *, processes: int = 1, walk: Path | None = None
) -> Iterator[Callable[[], ReadReport]]:
    """Start a loop that has read its list and waits; it begins when the yielded function is called.

    So the start of Python does not count, while a mount loads ahead. The function raises an error
    if a file cannot be read, or has another size.
    """
    arguments = [str(order.list_file), str(processes), loop, *([] if walk is None else [str(walk)])]
    with subprocess.Popen(
        [python, "-P", str(_LOOPS), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None

        def run() -> ReadReport:
            output, _ = process.communicate(b"go\n", DEADLINE_S)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
            report = ReadReport(**json.loads(output))
            order.check(report, with_sum=False, walked=walk is not None)
            return report

        try:
            process.stdout.readline()
            yield run
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run_loop(python: str, order: Order, loop: str, *, processes: int = 1) -> ReadReport:
    with waiting_loop(python, order, loop, processes=processes) as run:
        return run()

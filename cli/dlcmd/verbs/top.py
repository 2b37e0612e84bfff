"""The verb `top`."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import click

from diesel_fs.mounts.statistics.reader_groups import reader_group

from ..args.options import argument, global_flags, mount_folder, option, verb
from ..show.mount_figures import MountSamples, Stats, interval
from ..show.mount_top import screen, short_line
from ..show.output import is_terminal, print_json, write_stdout

INTERVAL_S = 0.1, 3600.0

_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_HOME, _END_OF_LINE, _END_OF_SCREEN = b"\x1b[H", b"\x1b[K\r\n", b"\x1b[J"


@verb("top")
@argument("folder", type=mount_folder, metavar="DIR")
@option(
    "--interval", "every_s", type=click.FloatRange(*INTERVAL_S), metavar="SECONDS", default=1.0,
    show_default=True, help="Time between two updates.",
)  # fmt: skip
@option(
    "--count", type=click.IntRange(1), metavar="N",
    help="End after N updates.  [default: Ctrl-C ends it]",
)  # fmt: skip
def top(folder: Path, every_s: float, count: int | None) -> None:
    """Show live how long the readers of a mount wait, and for what.

    Each second is divided among the causes of waits: the object store, other nodes of the task,
    decompression, the prefetch worker, the mount itself, metadata. The remaining time belongs to
    the readers themselves (they decode, compute or read from the page cache), or to nobody if no
    reader was seen. The same follows for each rank or process.

    On a terminal the view is renewed in place; elsewhere each update is a line, and with --json an
    object. Ctrl-C ends it with exit code 0, the end of the mount with 10.

    \b
    Examples:
      dlcmd top /mnt/pets
      dlcmd top --json --count 60 /mnt/pets > waits.jsonl
    """
    samples = MountSamples(folder)
    own_pid = reader_group(os.getpid()).pid
    is_live = not global_flags().json and is_terminal()
    with suppress(KeyboardInterrupt), _terminal(is_live=is_live):
        before = samples.take()
        due_s = time.monotonic()
        updates = 0
        while count is None or updates < count:
            due_s = max(due_s + every_s, time.monotonic())
            time.sleep(max(due_s - time.monotonic(), 0.0))
            after = samples.take_after(before)
            _show(after, interval(before, after, own_pid=own_pid), is_live=is_live)
            before = after
            updates += 1


def _show(stats: Stats, found: Mapping[str, object], *, is_live: bool) -> None:
    if global_flags().json:
        print_json({"time": round(time.time(), 3), **found})
    elif is_live:
        columns, rows = shutil.get_terminal_size()
        lines = screen(stats, found, columns, rows - 1)
        shown = b"".join(line.encode("utf-8", "replace") + _END_OF_LINE for line in lines)
        write_stdout([_HOME, shown, _END_OF_SCREEN])
    else:
        clock = datetime.now().astimezone().strftime("%H:%M:%S")
        write_stdout([f"{clock} {short_line(found)}\n".encode()])


@contextmanager
def _terminal(*, is_live: bool) -> Iterator[None]:
    if not is_live:
        yield
        return
    write_stdout([_HIDE_CURSOR, _HOME, _END_OF_SCREEN])
    try:
        yield
    finally:
        with suppress(OSError):
            write_stdout([_SHOW_CURSOR])

"""Shows a verb's progress: as a bar on a terminal, or as lines of JSON with --json."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ..args.options import global_flags
from .output import Value, print_json

DRAW_S = 0.1
REPORT_S = 1.0


class ShowProgress(Protocol):
    """A `total` of 0 is not known yet. `content_bytes` is None if the verb counts no bytes. May be
    called at any rate; never fails."""

    def __call__(self, done: int, total: int, content_bytes: int | None = None) -> None: ...


def is_bar_shown() -> bool:
    flags = global_flags()
    return not (flags.json or flags.quiet) and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def shown_progress(title: str, unit: str = "entries") -> Iterator[ShowProgress]:
    """`unit` is the plural noun of the counted things."""
    flags = global_flags()
    if flags.json and not flags.quiet:
        start_s = time.monotonic()

        def print_progress(done: int, total: int, content_bytes: int | None = None) -> None:
            print_json(progress_json(unit, time.monotonic() - start_s, done, total, content_bytes))

        yield _throttled(print_progress, REPORT_S, start_s + REPORT_S)
    elif is_bar_shown():
        from .drawing import Bar  # noqa: PLC0415  # rich takes 0.1 s to import

        bar = Bar(title, unit)
        try:
            yield _throttled(bar.draw, DRAW_S, 0.0)
        finally:
            with suppress(OSError):
                bar.close()
    else:
        yield lambda *_: None


def _throttled(show: ShowProgress, interval_s: float, next_s: float) -> ShowProgress:
    """Calls `show` from the monotonic time `next_s` on. If the reader of stdout has ended, the verb
    goes on."""

    def show_sometimes(done: int, total: int, content_bytes: int | None = None) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + interval_s
            with suppress(OSError):
                show(done, total, content_bytes)

    return show_sometimes


def progress_json(
    unit: str, passed_s: float, done: int, total: int, content_bytes: int | None
) -> dict[str, Value]:
    rate = done / passed_s
    to_do = max(total - done, 0)  # a total may turn out too small
    described: dict[str, Value] = {
        "event": "progress",
        unit: done,
        f"{unit}_total": total or None,
        f"{unit}_per_s": round(rate, 1),
        "seconds": round(passed_s, 3),
        "seconds_left": round(to_do / rate, 1) if total and rate else None,
    }
    if content_bytes is not None:
        described |= {"bytes": content_bytes, "bytes_per_s": round(content_bytes / passed_s)}
    return described

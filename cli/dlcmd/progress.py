"""Shows how far a verb has come: as a bar on a terminal, as lines of JSON with --json, else not."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from .options import global_flags
from .output import Value, print_json

DRAW_S = 0.1
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a verb has come. `total` is 0 as long as it is unknown; `content_bytes` is None for a
    verb that counts no bytes."""

    done: int
    total: int
    content_bytes: int | None = None


ShowProgress = Callable[[Progress], None]


class _Bar(Protocol):
    def draw(self, done: int, total: int, content_bytes: int | None) -> None: ...
    def close(self) -> None: ...


def is_bar_shown() -> bool:
    """Whether progress is shown as a bar: on a terminal, without -q or --json."""
    flags = global_flags()
    return not (flags.json or flags.quiet) and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def shown_progress(title: str, unit: str = "entries") -> Iterator[ShowProgress]:
    """Show progress inside `with`: gives a function to call with each step, as often as one likes.

    `unit` is the noun of what is counted, in the plural. The function never fails, so that the work
    goes on where its progress cannot be shown.
    """
    flags = global_flags()
    if flags.json and not flags.quiet:
        yield _JsonLines(time.monotonic(), unit).show
    elif is_bar_shown():
        from .drawing import Bar  # noqa: PLC0415  # rich takes 0.1 s to import

        bar = Bar(title, unit)
        try:
            yield _ThrottledBar(bar).show
        finally:
            with suppress(OSError):
                bar.close()
    else:
        yield lambda _: None


class _ThrottledBar:
    """Draws a bar every DRAW_S seconds at most."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        self._next_s = 0.0

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + DRAW_S
            with suppress(OSError):
                self._bar.draw(progress.done, progress.total, progress.content_bytes)


class _JsonLines:
    """Prints a line of JSON every REPORT_S seconds at most."""

    def __init__(self, start_s: float, unit: str) -> None:
        self._unit = unit
        self._start_s = start_s
        self._next_s = start_s + REPORT_S

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + REPORT_S
        passed_s = now_s - self._start_s
        rate = progress.done / passed_s
        to_do = max(progress.total - progress.done, 0)  # a total may turn out too small
        left_s = to_do / rate if progress.total and rate else None
        unit, content_bytes = self._unit, progress.content_bytes
        described: dict[str, Value] = {
            "event": "progress",
            unit: progress.done,
            f"{unit}_total": progress.total or None,
            f"{unit}_per_s": round(rate, 1),
            "seconds": round(passed_s, 3),
            "seconds_left": None if left_s is None else round(left_s, 1),
        }
        if content_bytes is not None:
            described |= {"bytes": content_bytes, "bytes_per_s": round(content_bytes / passed_s)}
        with suppress(OSError):  # the reader of stdout may have ended; a put goes on
            print_json(described)

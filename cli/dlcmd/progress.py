"""How far a verb has come: a bar on a terminal, lines of JSON with --json, else nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from .options import global_flags
from .output import Value, say_json

DRAW_S = 0.1
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it has come; `total` is 0 as long as nobody knows it. A verb that counts no bytes
    leaves them out."""

    done: int
    total: int
    content_bytes: int | None = None


ShowProgress = Callable[[Progress], None]


class _Bar(Protocol):
    def draw(self, done: int, total: int, content_bytes: int | None) -> None: ...
    def close(self) -> None: ...


def draws() -> bool:
    """Whether a bar is seen: on a terminal, without -q or --json."""
    found = global_flags()
    return not (found.json or found.quiet) and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def shown_progress(title: str, unit: str = "entries") -> Iterator[ShowProgress]:
    """Where to report progress, as often as one likes. It never fails: work goes on unseen.

    `unit` is what is counted, in the plural.
    """
    found = global_flags()
    if found.json and not found.quiet:
        yield _Lines(time.monotonic(), unit).report
    elif draws():
        from .drawing import Bar  # noqa: PLC0415  # rich takes 0.1 s to import

        bar = Bar(title, unit)
        try:
            yield _Seldom(bar).draw
        finally:
            with suppress(OSError):
                bar.close()
    else:
        yield lambda _: None


class _Seldom:
    """Draws no more often than the eye can follow."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        self._next_s = 0.0

    def draw(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + DRAW_S
            with suppress(OSError):
                self._bar.draw(progress.done, progress.total, progress.content_bytes)


class _Lines:
    """One line of JSON a second."""

    def __init__(self, start_s: float, unit: str) -> None:
        self._unit = unit
        self._start_s = start_s
        self._next_s = start_s + REPORT_S

    def report(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + REPORT_S
        passed_s = now_s - self._start_s
        rate = progress.done / passed_s
        to_do = max(progress.total - progress.done, 0)  # what failed is never done
        left = to_do / rate if progress.total and rate else None
        unit, moved = self._unit, progress.content_bytes
        said: dict[str, Value] = {
            "event": "progress",
            unit: progress.done,
            f"{unit}_total": progress.total or None,
            f"{unit}_per_s": round(rate, 1),
            "seconds": round(passed_s, 3),
            "seconds_left": None if left is None else round(left, 1),
        }
        if moved is not None:
            said |= {"bytes": moved, "bytes_per_s": round(moved / passed_s)}
        with suppress(OSError):  # a put goes on where its reader has gone
            say_json(said)

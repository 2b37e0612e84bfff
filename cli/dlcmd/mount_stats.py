"""What `dlcmd stats` shows of a mount: figures in groups, with units, and a line for each stream.

Pure. Whatever a mount tells is shown, also what this version does not know.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from .output import bytes_text

_GROUPS = {
    "requests": "requests of the kernel",
    "reads": "reads that reached the mount",
    "cache": "chunks in the mount's memory",
    "residency": "contents in the kernel's cache",
    "store": "read from the store to be pushed",
    "lists": ".diesel/filelist",
    "task": "the task's cache",
    "client": "what this mount has read through it",
    "holdings": "what this node holds",
    "peers": "other nodes",
    "follow": "following the dataset",
}
"""Titles, by the name of a group."""

_STREAM_COLUMNS = ("stream", "epoch", "position", "of", "", "files/s", "")


def stats_lines(stats: Mapping[str, object]) -> Iterator[str]:
    """The lines of a mount's statistics."""
    yield "(counters may be a second old)"
    yield from _figures({name: value for name, value in stats.items() if not _is_group(value)})
    for name, value in stats.items():
        if isinstance(value, Mapping) and value:
            yield from _group(name, value)


def _is_group(value: object) -> bool:
    return isinstance(value, Mapping | list)


def _group(name: str, values: Mapping[str, object]) -> Iterator[str]:
    yield ""
    yield f"{_GROUPS.get(name, name)}:"
    figures = {
        each: value
        for each, value in values.items()
        if not isinstance(value, Mapping) and each != "streams"
    }
    yield from (f"  {line}" for line in _figures(figures))
    streams = values.get("streams")
    for each, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _group(each, value)
    if isinstance(streams, list) and streams:
        yield ""
        yield "plans:"
        yield from (f"  {line}" for line in _streams(streams))


def _figures(figures: Mapping[str, object]) -> Iterator[str]:
    width = max((len(name) for name in figures), default=0)
    for name, value in figures.items():
        yield f"{name.replace('_', ' '):<{width}}  {_text(name, value)}"


def _text(name: str, value: object) -> str:
    if name == "since" and isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC).isoformat(sep=" ", timespec="seconds")
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name == "bytes" or name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_s"):
        return f"{value:,.1f} s"
    if name in ("version", "newest", "told", "pid", "server_pid", "seed"):
        return str(value)
    return f"{value:,}"


def _streams(streams: list[object]) -> Iterator[str]:
    rows = [_STREAM_COLUMNS, *(_stream(each) for each in streams if isinstance(each, Mapping))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_STREAM_COLUMNS))]
    for row in rows:
        name, *rest = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((name, *rest)).rstrip()


def _stream(stats: Mapping[str, object]) -> tuple[str, ...]:
    """One reader's place in its plan."""
    number = {each: value for each, value in stats.items() if isinstance(value, int | float)}
    name, epoch = str(stats.get("name", "?")), number.get("epoch", -1)
    if epoch < 0:
        return name, "-", "", "", "", "", "all read"
    position, length = number.get("position", 0), number.get("length", 0)
    part = f"{100 * position / length:.0f} %" if length else ""
    rate = f"{number.get('entries_per_s', 0):,.0f}"
    note = "not followed yet" if stats.get("tentative") else ""
    return name, str(epoch), f"{position:,}", f"{length:,}", part, rate, note

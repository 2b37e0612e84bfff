"""Formats the statistics of a mount for `dlcmd stats`: figures in groups, with units. Pure.

Figures that this version does not know are shown too.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from .output import bytes_text

_GROUPS = {
    "requests": "requests of the kernel",
    "reads": "reads that reached the mount",
    "waits": "how long readers have waited",
    "causes_s": "of it, in seconds, for",
    "requests_s": "all requests added up, in seconds, for",
    "cache": "chunks in the mount's memory",
    "residency": "contents in the kernel's cache",
    "store": "read from the store to be pushed",
    "lists": ".diesel/filelist",
    "task": "the task's cache",
    "client": "what this mount has read through it",
    "node_cache": "what this node holds",
    "peers": "other nodes",
    "follow": "following the dataset",
}

_STREAM_COLUMNS = ("stream", "epoch", "position", "of", "", "files/s", "")


def stats_lines(stats: Mapping[str, object]) -> Iterator[str]:
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
        key: value
        for key, value in values.items()
        if not isinstance(value, Mapping) and key not in ("streams", "readers")
    }
    yield from (f"  {line}" for line in _figures(figures))
    streams = values.get("streams")
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _group(key, value)
    readers = values.get("readers")
    if isinstance(readers, list) and readers:
        yield ""
        yield "readers:"
        yield from (f"  {_reader(each)}" for each in readers if isinstance(each, Mapping))
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


def _reader(stats: Mapping[str, object]) -> str:
    named = "process" if stats.get("rank") is None else "rank"
    number = stats.get("pid") if stats.get("rank") is None else stats.get("rank")
    requests, waited_s = stats.get("requests", 0), stats.get("waited_s", 0.0)
    return (
        f"{named} {number} {stats.get('command')}: {requests:,} requests, waited {waited_s:.1f} s"
    )


def _streams(streams: list[object]) -> Iterator[str]:
    rows = [_STREAM_COLUMNS, *(_stream(stats) for stats in streams if isinstance(stats, Mapping))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_STREAM_COLUMNS))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells).rstrip()


def _stream(stats: Mapping[str, object]) -> tuple[str, ...]:
    number = {key: value for key, value in stats.items() if isinstance(value, int | float)}
    name, epoch = str(stats.get("name", "?")), number.get("epoch", -1)
    if epoch < 0:  # it has been read to its end
        return name, "-", "", "", "", "", "all read"
    position, length = number.get("position", 0), number.get("length", 0)
    part = f"{100 * position / length:.0f} %" if length else ""
    rate = f"{number.get('entries_per_s', 0):,.0f}"
    note = "not followed yet" if stats.get("tentative") else ""
    return name, str(epoch), f"{position:,}", f"{length:,}", part, rate, note

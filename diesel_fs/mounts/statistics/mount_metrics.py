"""Turns the statistics of a mount (`.diesel/stats`) into metrics for Prometheus (METRICS.md).

A figure that a mount does not have gives no line. The functions are pure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...metrics import Sample, metric_lines

Stats = Mapping[str, object]

TASK_TIERS = ("mapped", "local", "peer", "store")
"""Where ranges of chunks were when they were read through the task's shared cache."""


@dataclass(frozen=True, slots=True)
class MountMetric:
    name: str
    kind: str  # "counter" or "gauge"
    help: str
    samples: Callable[[Stats], Iterable[Sample]]


def metrics_text(stats: Stats) -> str:
    lines: list[str] = []
    for metric in TABLE:
        samples = list(metric.samples(stats))
        if samples:
            lines += metric_lines(metric.name, metric.kind, metric.help, samples)
    return "\n".join([*lines, ""])


def _at(stats: Stats, path: str) -> object:
    """The value at a path of names with dots between them."""
    found: object = stats
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _number(path: str, **labels: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        value = _at(stats, path)
        if isinstance(value, int | float):
            yield labels, float(value)

    return samples


def _each(path: str, label: str) -> Callable[[Stats], Iterator[Sample]]:
    """The names of a map's values become the label."""

    def samples(stats: Stats) -> Iterator[Sample]:
        values = _at(stats, path)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, int | float):
                yield {label: str(name)}, float(value)

    return samples


def _several(*some: Callable[[Stats], Iterable[Sample]]) -> Callable[[Stats], Iterator[Sample]]:
    return lambda stats: (sample for each in some for sample in each(stats))


def _info(stats: Stats) -> Iterator[Sample]:
    names = ("dataset", "version", "session")
    yield {name: str(stats[name]) for name in names if name in stats}, 1.0


def _of_ranks(path: str, label: str = "") -> Callable[[Stats], Iterator[Sample]]:
    """For each rank: a number, or with a label all values of a map."""

    def samples(stats: Stats) -> Iterator[Sample]:
        readers = _at(stats, "waits.readers")
        for reader in readers if isinstance(readers, list) else ():
            if reader["rank"] is not None:
                find = _each(path, label) if label else _number(path)
                for labels, value in find(reader):
                    yield {"rank": str(reader["rank"]), **labels}, value

    return samples


def _of_streams(path: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        streams = _at(stats, "residency.streams")
        for stream in streams if isinstance(streams, list) else ():
            if stream["epoch"] >= 0:  # -1: the stream has been read to its end
                for _, value in _number(path)(stream):
                    yield {"stream": str(stream["name"])}, value

    return samples


TABLE = (
    MountMetric("diesel_mount_info", "gauge", "1; labels: dataset, version, session.", _info),
    MountMetric("diesel_mount_uptime_seconds", "gauge", "Age of the mount.", _number("uptime_s")),
    MountMetric(
        "diesel_mount_requests_total",
        "counter",
        "Requests of the kernel.",
        _each("requests", "request"),
    ),
    MountMetric(
        "diesel_mount_waited_seconds_total",
        "counter",
        "Time in which at least one request waited, divided among the causes.",
        _each("waits.causes_s", "cause"),
    ),
    MountMetric(
        "diesel_mount_request_wait_seconds_total",
        "counter",
        "Time that requests waited, added up over all requests.",
        _each("waits.requests_s", "cause"),
    ),
    MountMetric(
        "diesel_mount_waiting_requests",
        "gauge",
        "Requests that wait for their answer.",
        _number("waits.waiting"),
    ),
    MountMetric(
        "diesel_mount_rank_waited_seconds_total",
        "counter",
        "The same as diesel_mount_waited_seconds_total, of one rank.",
        _of_ranks("causes_s", "cause"),
    ),
    MountMetric(
        "diesel_mount_rank_requests_total",
        "counter",
        "Requests of one rank.",
        _of_ranks("requests"),
    ),
    MountMetric(
        "diesel_mount_reads_total",
        "counter",
        "READs, by where their bytes were: in the mount's memory, or to be fetched.",
        _several(_number("reads.hits", tier="memory"), _number("reads.misses", tier="fetched")),
    ),
    MountMetric(
        "diesel_mount_held_reads_total",
        "counter",
        "READs that were held for the prefetch worker.",
        _number("reads.held"),
    ),
    MountMetric(
        "diesel_mount_failed_reads_total", "counter", "READs that failed.", _number("reads.failed")
    ),
    MountMetric(
        "diesel_mount_read_bytes_total",
        "counter",
        "Bytes that READs were answered with.",
        _number("reads.bytes"),
    ),
    MountMetric(
        "diesel_mount_fetched_bytes_total",
        "counter",
        "Bytes fetched, by the process of the mount that did it.",
        _several(
            _number("cache.fetched_bytes", process="server"),
            _number("residency.store.fetched_bytes", process="prefetch"),
        ),
    ),
    MountMetric(
        "diesel_mount_task_reads_total",
        "counter",
        "Ranges of chunks read through the task's shared cache, by where they were.",
        _several(*(_number(f"task.client.{tier}_reads", tier=tier) for tier in TASK_TIERS)),
    ),
    MountMetric(
        "diesel_mount_pushed_files_total",
        "counter",
        "Files pushed into the page cache.",
        _number("residency.pushed_entries"),
    ),
    MountMetric(
        "diesel_mount_pushed_bytes_total",
        "counter",
        "Bytes pushed into the page cache.",
        _number("residency.pushed_bytes"),
    ),
    MountMetric(
        "diesel_mount_dropped_files_total",
        "counter",
        "Files dropped from the page cache.",
        _number("residency.dropped_entries"),
    ),
    MountMetric(
        "diesel_mount_resident_bytes",
        "gauge",
        "Bytes in the page cache, as far as the mount knows.",
        _number("residency.resident_bytes"),
    ),
    MountMetric(
        "diesel_mount_resident_budget_bytes",
        "gauge",
        "Memory for contents in the page cache.",
        _number("residency.budget_bytes"),
    ),
    MountMetric(
        "diesel_mount_plan_position_files",
        "gauge",
        "Files of its epoch that the reader of a plan has read.",
        _of_streams("position"),
    ),
    MountMetric(
        "diesel_mount_plan_length_files",
        "gauge",
        "Files in the epoch of a plan.",
        _of_streams("length"),
    ),
)

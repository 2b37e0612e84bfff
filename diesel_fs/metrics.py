"""Counts the metrics of a server in shared memory, and writes them as text for Prometheus.

`metric_lines` also writes the metrics of a mount (`mounts/statistics/mount_metrics.py`).

The table lists the values of each label, so the memory has a fixed size: no client can add a label
value, and no value names a user or a dataset. Each process counts in *cells* (one number for each
combination of label values) that only it writes; the text shows the sums over all processes. A
restarted process continues the cells of the one before, since a counter of Prometheus must not go
back. Importing `prometheus-client` for the text format (0.0.4) would slow the server's start. Any
thread.
"""

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

CELL_BYTES = 8

OTHER = "other"
"""Stands for all unlisted label values."""

REQUESTS = (
    *("datasets", "dataset", "begin", "put", "finish", "snapshot", "kept", "read", "stat", "list"),
    *("reclaimable", "verify", "recover", "purge", "delete_dataset", "lease", "join", "leave"),
    *("users", "set_user", "remove_user", "import_users", "grant"),
    *("archives", "record_archive", OTHER),
)
"""The texts in the field `do` of a client's requests (`net/WIRE.md`)."""

OUTCOMES = ("ok", "refused", "error", "busy", "bug", "gone")
"""How a request ends: done; not permitted; another DieselError; the server is overloaded; a bug;
the client has gone before the answer."""

REFUSALS = (
    *("greeting", "version", "login", "permission", "frame"),
    *("connections", "address", "user", "memory", "requests", "threads", "going", OTHER),
)
"""Why the server refused a connection or request. First line: a bad or late first message, an
unknown version of the protocol, a failed login, a missing role, a malformed or slow frame. Second
line: a limit was reached, or the server is about to end (`going`)."""

TIERS = ("memory", "disk", "store")

BUCKETS_S = (0.0005, 0.002, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
"""Upper bounds, from a hit in memory to a slow store."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    labels: Mapping[str, Sequence[str]]

    @property
    def cell_labels(self) -> Iterable[tuple[str, ...]]:
        """The label values of each cell; a histogram has a cell for each bucket and the sum."""
        values = list(self.labels.values())
        if self.kind == "histogram":
            values.append([*map(str, BUCKETS_S), "+Inf", "sum"])
        return itertools.product(*values)


TABLE = (
    Metric(
        "diesel_requests_total",
        "counter",
        "Requests that have ended, by the request and its outcome.",
        {"do": REQUESTS, "outcome": OUTCOMES},
    ),
    Metric(
        "diesel_request_seconds",
        "histogram",
        "Time from the end of a request to the end of its answer.",
        {"do": REQUESTS},
    ),
    Metric("diesel_requests_under_way", "gauge", "Requests that have not ended.", {}),
    Metric("diesel_received_bytes_total", "counter", "Bytes received from clients.", {}),
    Metric("diesel_sent_bytes_total", "counter", "Bytes sent to clients.", {}),
    Metric("diesel_connections", "gauge", "Connections that are open.", {}),
    Metric("diesel_connections_total", "counter", "Connections that were accepted.", {}),
    Metric("diesel_logins_total", "counter", "Logins that succeeded.", {}),
    Metric(
        "diesel_refusals_total",
        "counter",
        "Connections and requests that were refused, by the reason.",
        {"reason": REFUSALS},
    ),
    Metric(
        "diesel_payload_bytes",
        "gauge",
        "Memory reserved for the payloads and answers of requests under way.",
        {},
    ),
    Metric(
        "diesel_tier_hits_total",
        "counter",
        "Reads, by what answered them: the cache in memory or on disk, or the object store.",
        {"tier": TIERS},
    ),
    Metric(
        "diesel_tier_bytes_total",
        "counter",
        "Bytes read, by the tier that answered.",
        {"tier": TIERS},
    ),
    Metric("diesel_chunks_accepted_total", "counter", "Chunks that were put and committed.", {}),
    Metric("diesel_commits_total", "counter", "Commits; each may have several chunks.", {}),
    Metric("diesel_uploaded_bytes_total", "counter", "Bytes of chunks that were accepted.", {}),
    Metric("diesel_worker_beats_total", "counter", "Signs of life of the workers' loops.", {}),
)

PARENT_TABLE = (
    Metric("diesel_workers", "gauge", "Worker processes that accept connections.", {}),
    Metric("diesel_worker_starts_total", "counter", "Worker processes that were started.", {}),
)
"""The metrics of the supervisor, which starts the workers."""


class MetricCells:
    """The cells of one process. Only that process may call `add`, `set` and `observe`."""

    def __init__(self, memory: memoryview, table: Sequence[Metric] = TABLE) -> None:
        """`memory` has `cells_bytes(table)` bytes, zero at first."""
        self.table = table
        self._cells = memory.cast("d")
        self._lock = threading.Lock()
        keys = [(metric.name, *values) for metric in table for values in metric.cell_labels]
        self._index_of_cell = {key: i for i, key in enumerate(keys)}
        self._listed = {
            metric.name: [frozenset(values) for values in metric.labels.values()]
            for metric in table
        }

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter or a gauge. An unlisted label value counts as `OTHER`, or raises
        KeyError if the label does not list `OTHER`."""
        index = self._index(name, labels)
        with self._lock:
            self._cells[index] += amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge, or a counter with a total that the caller has counted."""
        self._cells[self._index(name, labels)] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        bucket = bisect_left(BUCKETS_S, value)
        text = str(BUCKETS_S[bucket]) if bucket < len(BUCKETS_S) else "+Inf"
        self.add(name, *labels, text)
        self.add(name, *labels, "sum", amount=value)

    def get(self, name: str, *labels: str) -> float:
        return self._cells[self._index(name, labels)]

    def clear_gauges(self) -> None:
        """For another process to call after the cells' process has ended."""
        for metric in self.table:
            if metric.kind == "gauge":
                for values in metric.cell_labels:
                    self._cells[self._index_of_cell[metric.name, *values]] = 0.0

    def _index(self, name: str, labels: tuple[str, ...]) -> int:
        index = self._index_of_cell.get((name, *labels))
        if index is None:
            values_of_each = self._listed[name]  # a histogram has its bucket as one label more
            counted_as = (
                label if label in values else OTHER
                for label, values in zip(labels, values_of_each, strict=False)
            )
            index = self._index_of_cell[(name, *counted_as, *labels[len(values_of_each) :])]
        return index


def cells_bytes(table: Sequence[Metric] = TABLE) -> int:
    return CELL_BYTES * sum(1 for metric in table for _ in metric.cell_labels)


def private_cells(table: Sequence[Metric] = TABLE) -> MetricCells:
    """Cells in this process's own memory."""
    return MetricCells(memoryview(bytearray(cells_bytes(table))), table)


def exposition(processes: Sequence[MetricCells]) -> str:
    """The sums over all processes, as text for Prometheus."""
    lines: list[str] = []
    for metric in processes[0].table:
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        sums = {
            values: sum(cells.get(metric.name, *values) for cells in processes)
            for values in metric.cell_labels
        }
        if metric.kind == "histogram":
            lines += _histogram(metric, sums)
        else:
            lines += [
                f"{metric.name}{_labels(metric, values)} {_number(value)}"
                for values, value in sums.items()
            ]
    return "\n".join([*lines, ""])


Sample = tuple[Mapping[str, str], float]
"""Label values by the labels' names, and the metric's value."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metric_lines(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Text for Prometheus. Values of labels may be any text."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
        yield f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _histogram(metric: Metric, sums: Mapping[tuple[str, ...], float]) -> Iterable[str]:
    for values in itertools.product(*metric.labels.values()):
        count = 0.0
        for bucket in (*map(str, BUCKETS_S), "+Inf"):
            count += sums[*values, bucket]
            yield f"{metric.name}_bucket{_labels(metric, values, bucket)} {_number(count)}"
        yield f"{metric.name}_sum{_labels(metric, values)} {_number(sums[*values, 'sum'])}"
        yield f"{metric.name}_count{_labels(metric, values)} {_number(count)}"


def _labels(metric: Metric, values: Sequence[str], bucket: str = "") -> str:
    pairs = [f'{name}="{value}"' for name, value in zip(metric.labels, values, strict=False)]
    if bucket:
        pairs.append(f'le="{bucket}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)

"""What a server counts: a fixed table of metrics, their cells in shared memory, and their text.

Owned here: names, labels, buckets, which cell is whose, Prometheus's text format (0.0.4). Not
owned: who counts, and the port that shows it (`diesel_server`).

Every label's values are listed here, so that no user, no dataset and no client can make a new one,
and so that the memory is of one size. A process counts in cells of its own, which others only
read; a total is a sum over the processes. A process that is started anew goes on counting in the
cells of the one before, as counters never go back. Any thread.
"""

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CELL_BYTES = 8

OTHER = "other"
"""Stands for a label's value that is not listed."""

REQUESTS = (
    *("datasets", "dataset", "begin", "put", "finish", "snapshot", "kept", "read", "stat", "list"),
    *("reclaimable", "verify", "recover", "purge", "delete_dataset", "lease", "join", "leave"),
    *("users", "set_user", "remove_user", "import_users", "grant", OTHER),
)

OUTCOMES = ("ok", "refused", "error", "busy", "bug", "gone")
"""Done; not allowed; an error of the tree; too much to do at once; an error that is a bug; the
client did not stay for the answer."""

REFUSALS = (
    *("greeting", "version", "login", "permission", "frame"),
    *("connections", "address", "user", "memory", "requests", "threads", "going", OTHER),
)

TIERS = ("memory", "disk", "store")

BUCKETS_S = (0.0005, 0.002, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table: its labels with all values that they have."""

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    labels: Mapping[str, Sequence[str]]

    @property
    def cell_labels(self) -> Iterable[tuple[str, ...]]:
        """The values of the labels of each cell; a histogram has its buckets and its sum, too."""
        values = list(self.labels.values())
        if self.kind == "histogram":
            values.append([*map(str, BUCKETS_S), "+Inf", "sum"])
        return itertools.product(*values)


TABLE = (
    Metric(
        "diesel_requests_total",
        "counter",
        "Requests that are over, by what was asked and how it ended.",
        {"do": REQUESTS, "outcome": OUTCOMES},
    ),
    Metric(
        "diesel_request_seconds",
        "histogram",
        "Time from the end of a request to the end of its answer.",
        {"do": REQUESTS},
    ),
    Metric("diesel_requests_under_way", "gauge", "Requests that are not over.", {}),
    Metric("diesel_received_bytes_total", "counter", "Bytes that clients sent.", {}),
    Metric("diesel_sent_bytes_total", "counter", "Bytes that were sent to clients.", {}),
    Metric("diesel_connections", "gauge", "Connections that are open.", {}),
    Metric("diesel_connections_total", "counter", "Connections that were accepted.", {}),
    Metric("diesel_logins_total", "counter", "Logins that succeeded.", {}),
    Metric(
        "diesel_refusals_total",
        "counter",
        "Connections and requests that were refused, by the reason.",
        {"reason": REFUSALS},
    ),
    Metric("diesel_payload_bytes", "gauge", "Memory that payloads under way may take.", {}),
    Metric("diesel_tier_hits_total", "counter", "Reads, by what answered them.", {"tier": TIERS}),
    Metric(
        "diesel_tier_bytes_total", "counter", "Bytes read, by what they came from.", {"tier": TIERS}
    ),
    Metric("diesel_chunks_accepted_total", "counter", "Chunks that were put and committed.", {}),
    Metric("diesel_commits_total", "counter", "Commits; one may bring several chunks.", {}),
    Metric("diesel_uploaded_bytes_total", "counter", "Bytes of chunks that were accepted.", {}),
    Metric("diesel_worker_beats_total", "counter", "Signs of life of the workers' loops.", {}),
)

PARENT_TABLE = (
    Metric("diesel_workers", "gauge", "Worker processes that accept connections.", {}),
    Metric("diesel_worker_starts_total", "counter", "Worker processes that were started.", {}),
)
"""What is counted once, by the process that watches over the others."""


class MetricCells:
    """The cells of one process over some memory; `add` and `set` are the process's own."""

    def __init__(self, memory: memoryview, table: Sequence[Metric] = TABLE) -> None:
        """`memory` has `cells_bytes(table)`, zero at first."""
        self.table = table
        self._cells = memory.cast("d")
        self._lock = threading.Lock()
        keys = [(metric.name, *values) for metric in table for values in metric.cell_labels]
        self._places = {key: i for i, key in enumerate(keys)}
        self._known = {
            metric.name: [frozenset(values) for values in metric.labels.values()]
            for metric in table
        }

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Count. A label's value that is not listed counts as `OTHER`."""
        place = self._index(name, labels)
        with self._lock:
            self._cells[place] += amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """What a gauge or a total that is counted elsewhere stands at."""
        self._cells[self._index(name, labels)] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Count a value in a histogram."""
        bucket = bisect_left(BUCKETS_S, value)
        text = str(BUCKETS_S[bucket]) if bucket < len(BUCKETS_S) else "+Inf"
        self.add(name, *labels, text)
        self.add(name, *labels, "sum", amount=value)

    def get(self, name: str, *labels: str) -> float:
        """What a cell stands at."""
        return self._cells[self._index(name, labels)]

    def clear_gauges(self) -> None:
        """Of a process that is over, nothing is open."""
        for metric in self.table:
            if metric.kind == "gauge":
                for values in metric.cell_labels:
                    self._cells[self._places[metric.name, *values]] = 0.0

    def _index(self, name: str, labels: tuple[str, ...]) -> int:
        place = self._places.get((name, *labels))
        if place is None:
            known = self._known[name]
            listed = (
                label if label in values else OTHER
                for label, values in zip(labels, known, strict=False)
            )
            place = self._places[(name, *listed, *labels[len(known) :])]
        return place


def cells_bytes(table: Sequence[Metric] = TABLE) -> int:
    """The memory of one process's cells."""
    return CELL_BYTES * sum(1 for metric in table for _ in metric.cell_labels)


def private_cells(table: Sequence[Metric] = TABLE) -> MetricCells:
    """Cells that nobody else sees."""
    return MetricCells(memoryview(bytearray(cells_bytes(table))), table)


def exposition(processes: Sequence[MetricCells]) -> str:
    """The sums over processes of one table, as Prometheus reads them."""
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

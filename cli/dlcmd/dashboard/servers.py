"""Servers on the dashboard: their metrics, as Prometheus gets them."""

import http.client
import re
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from diesel_fs.errors import ConfigError, DieselError
from diesel_fs.names import shown
from diesel_fs.urls import HostPort

from .history import History
from .watched import Described, Watched

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 4 << 20
COUNT_END = 1 << 63
"""Values of this size or larger are left out: infinity is no JSON, and would empty the page."""

TIERS = ("memory", "disk", "store")

COLUMNS = ("requests", "received", "sent", "uploaded", *TIERS, "refused")

_SAMPLE = re.compile(
    r"^(diesel_(?!request_seconds)[a-z_]+)(?:\{([^}]*)\})? (?!0$)([-+0-9.eE]+)$",
    re.MULTILINE | re.ASCII,
)
"""Matches lines with a value other than 0, of metrics that are no histograms: tens of several
hundred lines."""

_LABEL = re.compile(r'([a-z]+)="([^"\\]*)"', re.ASCII)

Metrics = Mapping[tuple[str, str], float]
"""Values by the name of a metric and the value of its label `tier`, `reason` or `outcome`, or
""."""


def parse_metrics_place(text: str) -> tuple[HostPort, str]:
    """The text is `[HOST:]PORT` or an `http://` URL. Raises ConfigError."""
    written = f"127.0.0.1:{text}" if text.isdecimal() else text
    try:
        parts = urlsplit(written if "://" in written else f"http://{written}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = parts.scheme == "http" and "@" not in parts.netloc and not parts.query
    if not is_plain or not parts.hostname or port is None:
        raise ConfigError(
            "a server's metrics are named by [HOST:]PORT or http://HOST:PORT/metrics",
            advice="give the value of diesel-server's option `--metrics`",
        )
    return HostPort(parts.hostname, port), parts.path if parts.path.strip("/") else "/metrics"


class WatchedServer(Watched):
    def __init__(self, source_id: str, place: HostPort, path: str) -> None:
        self._place, self._path = place, path
        self._before: tuple[float, Metrics] | None = None
        self._newest: tuple[float, Metrics] | None = None
        self._marked: tuple[float, Metrics] | None = None  # the sample at the last `point`
        super().__init__(source_id, History(COLUMNS))

    def refresh(self) -> None:
        text = self._get()
        metrics = parse_metrics(text)
        if "diesel_requests_total" not in text:
            raise DieselError("the program that answers there is no diesel-server")
        with self.lock:
            self._before, self._newest = self._newest, (time.monotonic(), metrics)

    def _get(self) -> str:
        connection = http.client.HTTPConnection(*self._place, timeout=ANSWER_S)
        try:
            connection.request("GET", self._path)
            answer = connection.getresponse()
            body = answer.read(ANSWER_BYTES_MAX + 1)
        except http.client.HTTPException as error:
            raise DieselError("the program that answers there speaks no HTTP") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise DieselError(f"it answers {answer.status}: no worker accepts connections")
        if len(body) > ANSWER_BYTES_MAX:
            raise DieselError("its answer is too long")
        return body.decode("utf-8", "replace")

    def describe(self) -> Described:
        with self.lock:
            before, newest = self._before, self._newest
        described: Described = {**self.standing(), "place": shown(str(self._place).encode())}
        if newest is None:
            return described
        values = newest[1]
        return {
            **described,
            "gauges": {
                "connections": total(values, "diesel_connections"),
                "under_way": total(values, "diesel_requests_under_way"),
                "payload_bytes": total(values, "diesel_payload_bytes"),
                "workers": total(values, "diesel_workers"),
            },
            "totals": {
                "requests": total(values, "diesel_requests_total"),
                "refused": total(values, "diesel_refusals_total"),
                "received_bytes": total(values, "diesel_received_bytes_total"),
                "sent_bytes": total(values, "diesel_sent_bytes_total"),
                "chunks": total(values, "diesel_chunks_accepted_total"),
                "commits": total(values, "diesel_commits_total"),
                "uploaded_bytes": total(values, "diesel_uploaded_bytes_total"),
                "logins": total(values, "diesel_logins_total"),
                **{f"{tier}_hits": values.get(("diesel_tier_hits_total", tier), 0.0)
                   for tier in TIERS},
            },
            "rates": _rates(before, newest),
        }  # fmt: skip

    def point(self) -> Mapping[str, float] | None:
        with self.lock:
            before, self._marked = self._marked, self._newest
            return _rates(before, self._newest) or None


def parse_metrics(text: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for name, labels, number in _SAMPLE.findall(text):
        pairs = dict(_LABEL.findall(labels))
        label = pairs.get("tier") or pairs.get("reason") or pairs.get("outcome") or ""
        try:
            value = float(number)
        except ValueError:
            continue
        if abs(value) < COUNT_END:
            found[name, label] = found.get((name, label), 0.0) + value
    return found


def total(values: Metrics, name: str) -> float:
    return sum(value for (found, _), value in values.items() if found == name)


def _rates(
    before: tuple[float, Metrics] | None, after: tuple[float, Metrics] | None
) -> dict[str, float]:
    """Returns figures per second, or {} without two samples. After a restart of the server, a rate
    is 0 instead of negative."""
    if before is None or after is None or after[0] <= before[0]:
        return {}
    passed_s = after[0] - before[0]

    def rate(name: str, label: str | None = None) -> float:
        values = [
            total(each, name) if label is None else each.get((name, label), 0.0)
            for each in (before[1], after[1])
        ]
        return round(max(values[1] - values[0], 0.0) / passed_s, 3)

    return {
        "requests": rate("diesel_requests_total"),
        "refused": rate("diesel_refusals_total"),
        "received": rate("diesel_received_bytes_total"),
        "sent": rate("diesel_sent_bytes_total"),
        "uploaded": rate("diesel_uploaded_bytes_total"),
        **{tier: rate("diesel_tier_hits_total", tier) for tier in TIERS},
    }

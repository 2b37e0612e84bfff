"""The figures of `dlcmd top` and of the dashboard: the changes between two samples of a mount's
statistics.

A mount's counters (see diesel_fs/mounts/SEMANTICS.md) grow from its beginning, so two samples give
one interval exactly. The part of an interval in which nothing waited is the readers' own work if
any reader was seen in it, otherwise idle time.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from diesel_fs.errors import DieselError, NotFoundError
from diesel_fs.mounts import stats as stats_of
from diesel_fs.mounts.mountpoints.mountpoint import is_alive, mounted_at, our_mount
from diesel_fs.mounts.plans.control import Control
from diesel_fs.mounts.statistics.waits import CAUSE_NAMES

Stats = Mapping[str, object]

TASK_TIERS = ("mapped", "local", "peer", "store")
"""A mount reads chunk parts through its task's cache from memory that the node's master shares,
from that master, from another node, or from the object store."""

RETRY_S = 0.05
GONE_WAIT_S = 2.0
"""If a mount that does not answer ends within this time, the error says that it has ended."""

NUMBER_END = 1 << 63
"""Larger numbers, and infinity, count as 0."""


class MountSamples:
    """Samples come over the mount's control socket; or, if the socket lets only the mount's user
    in, from `.diesel/stats`, which may be a second old."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if there is no mount on `folder`, NotFoundError if it is dead,
        DeadlineError if it hangs. A child process finds that out: this process would hang, too, and
        could not be ended."""
        self._found = our_mount(folder)
        if not is_alive(self._found.path):
            raise NotFoundError(
                f"the mount on {self._found.path} has ended", advice="unmount it, and mount again"
            )
        self._control: Control | None = None
        with suppress(DieselError):
            self._control = Control.connect(self._found.path)

    @property
    def is_cheap(self) -> bool:
        return self._control is not None

    def take(self) -> Stats:
        """Raises NotFoundError if the mount has ended, DieselError."""
        try:
            if self._control is not None:
                try:
                    return self._control.stats()
                except DieselError:  # it has ended, or its prefetch worker is busy
                    self._check_there()
            return stats_of(self._found.path)
        except DieselError:
            self._check_there(GONE_WAIT_S)
            raise

    def take_after(self, before: Stats) -> Stats:
        """Waits for a later clock than that of `before`."""
        while True:
            found = self.take()
            if clock_s(found) > clock_s(before):
                return found
            time.sleep(RETRY_S)

    def _check_there(self, wait_s: float = 0.0) -> None:
        """Raises NotFoundError if the mount has ended, or ends within `wait_s`."""
        path, until_s = self._found.path, time.monotonic() + wait_s
        while True:
            now = mounted_at(path)
            if now is None or now.device != self._found.device or not is_alive(path):
                raise NotFoundError(f"the mount on {path} has ended")
            if time.monotonic() >= until_s:
                return
            time.sleep(RETRY_S)


def clock_s(stats: Stats) -> float:
    """Raises DieselError for a mount of an older diesel-fs."""
    waits = stats.get("waits")
    if not isinstance(waits, Mapping):
        raise DieselError(
            "the mount does not report what its readers wait for",
            advice="an older diesel-fs has made it: mount it again",
        )
    return number_at(stats, "waits.clock_s")


def interval(before: Stats, after: Stats, *, own_pid: int) -> dict[str, object]:
    """`dlcmd top --json` prints these figures. They leave out the reads of the process group
    `own_pid`. The clock of `after` must be later than that of `before`."""
    passed_s = number_at(after, "waits.clock_s") - number_at(before, "waits.clock_s")

    def rate(path: str) -> float:
        return round(_difference(before, after, path) / passed_s, 3)

    causes_s = _causes_s(before, after, "waits.causes_s")
    waited_s = min(sum(causes_s.values()), passed_s)
    requests_s = _causes_s(before, after, "waits.requests_s")
    readers = [each for each in _readers(before, after, passed_s) if each["pid"] != own_pid]
    streams = list(_streams(before, after))
    is_seen = waited_s > 0 and any(each["requests_per_s"] for each in readers)
    is_seen = is_seen or any(each["moved"] for each in streams)
    left_s = round(passed_s - waited_s, 6)
    result: dict[str, object] = {
        "interval_s": round(passed_s, 6),
        "waited_s": round(waited_s, 6),
        "causes_s": causes_s,
        "reader_s": left_s if is_seen else 0.0,
        "idle_s": 0.0 if is_seen else left_s,
        "waiting": round(sum(requests_s.values()) / passed_s, 3),
        "requests_per_s": round(sum(number_at(each, "requests_per_s") for each in readers), 3),
        "read_bytes_per_s": rate("reads.bytes"),
        "reads_per_s": {"memory": rate("reads.hits"), "fetched": rate("reads.misses")},
        "fetched_bytes_per_s": rate("cache.fetched_bytes"),
    }
    if isinstance(at(after, "residency"), Mapping):
        result |= {
            "pushed_bytes_per_s": rate("residency.pushed_bytes"),
            "resident_bytes": int(number_at(after, "residency.resident_bytes")),
            "budget_bytes": int(number_at(after, "residency.budget_bytes")),
        }
    if isinstance(at(after, "task.client"), Mapping):
        tiers = {tier: rate(f"task.client.{tier}_reads") for tier in TASK_TIERS}
        result["task_reads_per_s"] = tiers
    plans = [{key: value for key, value in each.items() if key != "moved"} for each in streams]
    return {**result, "readers": readers, "plans": plans}


def _readers(before: Stats, after: Stats, passed_s: float) -> Iterator[dict[str, object]]:
    earlier = {_key(each): each for each in list_at(before, "waits.readers")}
    for each in list_at(after, "waits.readers"):
        old = earlier.get(_key(each), {})
        requests = _difference(old, each, "requests")
        if requests or number_at(each, "waiting"):
            yield {
                "rank": each["rank"],
                "pid": each["pid"],
                "command": each["command"],
                "requests_per_s": round(requests / passed_s, 3),
                "waited_s": round(_difference(old, each, "waited_s"), 6),
                "causes_s": _causes_s(old, each, "causes_s"),
            }


def _key(reader: Mapping[str, object]) -> tuple[object, object]:
    """The key is the reader's rank, or its process if it has no rank."""
    rank = reader["rank"]
    return rank, None if rank is not None else reader["pid"]


def _streams(before: Stats, after: Stats) -> Iterator[dict[str, object]]:
    earlier = {each["name"]: each for each in list_at(before, "residency.streams")}
    for each in list_at(after, "residency.streams"):
        old = earlier.get(each["name"], {})
        place = each["epoch"], each["position"]
        yield {
            "stream": each["name"],
            "epoch": each["epoch"] if number_at(each, "epoch") >= 0 else None,
            "position": each["position"],
            "length": each["length"],
            "entries_per_s": round(number_at(each, "entries_per_s"), 3),
            "moved": bool(old) and (old["epoch"], old["position"]) != place,
        }


def _causes_s(before: Stats, after: Stats, path: str) -> dict[str, float]:
    return {name: round(_difference(before, after, f"{path}.{name}"), 6) for name in CAUSE_NAMES}


def _difference(before: Stats, after: Stats, path: str) -> float:
    """A counter that began again, as after a restart of the prefetch worker, gives 0."""
    return max(number_at(after, path) - number_at(before, path), 0.0)


def at(stats: Stats, path: str) -> object:
    found: object = stats
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def number_at(stats: Stats, path: str) -> float:
    found = at(stats, path)
    if isinstance(found, int | float) and abs(found) < NUMBER_END:
        return float(found)
    return 0.0


def list_at(stats: Stats, path: str) -> list[Mapping[str, object]]:
    found = at(stats, path)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def mapping_at(stats: Stats, path: str) -> Mapping[str, object]:
    found = at(stats, path)
    return found if isinstance(found, Mapping) else {}

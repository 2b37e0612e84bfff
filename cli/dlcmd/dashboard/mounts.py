"""Mounts on the dashboard, and the tasks (jobs over several nodes) that they belong to."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from diesel_fs.errors import DieselError
from diesel_fs.mounts.mountpoints.mountpoint import DatasetMount, dataset_mounts
from diesel_fs.mounts.statistics.waits import CAUSE_NAMES
from diesel_fs.names import shown
from diesel_fs.peers.members.options import SINGLE_NODE_PREFIX
from diesel_fs.system.mountinfo import parse_mounts

from ..show.mount_figures import (
    TASK_TIERS,
    MountSamples,
    Stats,
    clock_s,
    interval,
    list_at,
    mapping_at,
    number_at,
)
from .history import History
from .watched import Described, Watched

CHILD_EVERY_S = 5.0
"""The pause between two samples of a mount that fails, or whose samples each start a process."""

READERS_SHOWN = 64

COLUMNS = (
    *(f"{name}_s" for name in (*CAUSE_NAMES, "reader", "idle")),
    *("read", "fetched", "pushed", "requests", "files"),
    *("memory", *TASK_TIERS),
)
"""A mount's history, per second: the seconds waited, by cause; bytes and requests; files read of
announced orders; reads, by tier."""

_TOTALS = {
    "reads": "reads.hits",
    "fetched_reads": "reads.misses",
    "failed_reads": "reads.failed",
    "read_bytes": "reads.bytes",
    "fetched_bytes": "cache.fetched_bytes",
    "waited_s": "waits.waited_s",
    "pushed_files": "residency.pushed_entries",
    "pushed_bytes": "residency.pushed_bytes",
    "dropped_files": "residency.dropped_entries",
    "resident_files": "residency.resident_entries",
    "resident_bytes": "residency.resident_bytes",
    "budget_bytes": "residency.budget_bytes",
}


class MountPlace(NamedTuple):
    """A later mount on the same path has another device number."""

    path: str
    device: str


class OwnMounts:
    """This user's mounts; for root, those of all users. A mount at several paths gets the first.
    Not safe for concurrent use."""

    def __init__(self) -> None:
        self._table = b""
        self._found: dict[MountPlace, DatasetMount] = {}

    def find(self) -> dict[MountPlace, DatasetMount]:
        """Costs little if nothing was mounted or unmounted since the last call."""
        table = Path("/proc/self/mountinfo").read_bytes()
        if table != self._table:
            user = os.geteuid()
            found: dict[str, DatasetMount] = {}
            for each in dataset_mounts(parse_mounts(table)):
                if not user or each.owner in (None, user):
                    found.setdefault(each.device or each.path, each)
            self._found = {MountPlace(each.path, each.device): each for each in found.values()}
            self._table = table
        return self._found


class WatchedMount(Watched):
    """The state is `gone` after an unmount."""

    def __init__(self, source_id: str, found: DatasetMount, own_pid: int) -> None:
        """The figures leave out the reads of the process group `own_pid`; -1 means none."""
        self._found = found
        self._own_pid = own_pid
        self._samples: MountSamples | None = None
        self._newest: Stats | None = None
        self._marked: Stats | None = None  # the sample at the last `point`
        self._figures: Described = {}
        self.gone_s: float | None = None  # monotonic
        super().__init__(source_id, History(COLUMNS))

    @property
    def state(self) -> str:
        return "gone" if self.gone_s is not None else super().state

    def refresh(self) -> None:
        try:
            sample = self._take()
        except BaseException:
            self._samples, self.least_s = None, CHILD_EVERY_S
            raise
        with self.lock:
            if self._newest is not None and clock_s(sample) <= clock_s(self._newest):
                return  # statistics in a file may be a second old
            if self._newest is not None:
                self._figures = interval(self._newest, sample, own_pid=self._own_pid)
            self._newest = sample  # only now: `interval` refuses a malformed sample

    def _take(self) -> Stats:
        if self._samples is None:
            self._samples = MountSamples(Path(self._found.path))
            self.least_s = 0.0 if self._samples.is_cheap else CHILD_EVERY_S
        sample = self._samples.take()
        try:
            json.dumps(sample, allow_nan=False)
        except ValueError:  # another user's mount may report anything
            raise DieselError("its statistics make no sense") from None
        return sample

    def describe(self) -> Described:
        with self.lock:
            stats, figures = self._newest, self._figures
        described: Described = {
            **self.standing(),
            "path": _text(self._found.path),
            "dataset": self._found.source.partition("@")[0],
        }
        if stats is None:
            return described
        totals: Described = {name: number_at(stats, path) for name, path in _TOTALS.items()}
        totals["requests"] = sum(
            value for value in mapping_at(stats, "requests").values() if isinstance(value, int)
        )
        return {
            **described,
            "version": str(stats.get("version")),
            "session": stats.get("session"),
            "uptime_s": stats.get("uptime_s"),
            "files": stats.get("entries"),
            "bytes": stats.get("bytes"),
            "warning": stats.get("warning", ""),
            "totals": totals,
            "figures": _shown_figures(figures),
            "plans": [_plan(each) for each in list_at(stats, "residency.streams")],
            "task": _task_name(stats),
        }

    def point(self) -> Mapping[str, float] | None:
        with self.lock:
            before, after = self._marked, self._newest
            self._marked = after
        if before is None or after is None or clock_s(after) <= clock_s(before):
            return None
        found = interval(before, after, own_pid=self._own_pid)
        passed_s = number_at(found, "interval_s")
        tiers = {tier: number_at(found, f"task_reads_per_s.{tier}") for tier in TASK_TIERS}
        if "task_reads_per_s" not in found:
            tiers["store"] = number_at(found, "reads_per_s.fetched")
        return {
            **{
                f"{name}_s": number_at(found, f"causes_s.{name}") / passed_s for name in CAUSE_NAMES
            },
            "reader_s": number_at(found, "reader_s") / passed_s,
            "idle_s": number_at(found, "idle_s") / passed_s,
            "read": number_at(found, "read_bytes_per_s"),
            "fetched": number_at(found, "fetched_bytes_per_s"),
            "pushed": number_at(found, "pushed_bytes_per_s"),
            "requests": number_at(found, "requests_per_s"),
            "files": sum(number_at(each, "entries_per_s") for each in list_at(found, "plans")),
            "memory": number_at(found, "reads_per_s.memory"),
            **tiers,
        }

    @property
    def stats(self) -> Stats | None:
        with self.lock:
            return self._newest


def tasks(sources: Iterable[WatchedMount]) -> list[Described]:
    """The members of a task are its nodes. Any node's mount names all members, but only a node's
    own mount reports how much of its share (the chunks that it caches for the task) it holds."""
    found: dict[tuple[str, str], Described] = {}
    members: dict[tuple[str, str], dict[int, Described]] = {}
    for source in sources:
        stats = source.stats
        if stats is None or source.gone_s is not None or not _task_name(stats):
            continue
        key = _task_name(stats), str(stats.get("identity"))
        task = found.setdefault(key, _task(stats))
        mounts_of_task = task["mounts"]
        assert isinstance(mounts_of_task, list)
        mounts_of_task.append(source.id)
        known = members.setdefault(key, {})
        for rank, member in _members(stats).items():
            old = known.get(rank)
            if old is None or member["is_here"]:
                known[rank] = {**(old or {}), **member}
    for key, task in found.items():
        task["members"] = [members[key][rank] for rank in sorted(members[key])]
    return [found[key] for key in sorted(found)]


def _task_name(stats: Stats) -> str:
    name = mapping_at(stats, "task").get("name")
    return _text(name) if isinstance(name, str) and not name.startswith(SINGLE_NODE_PREFIX) else ""


def _task(stats: Stats) -> Described:
    return {
        "name": _task_name(stats),
        "dataset": stats.get("dataset"),
        "version": str(mapping_at(stats, "task").get("version", "")),
        "world": int(number_at(stats, "task.world")),
        "member_count": int(number_at(stats, "task.members")),
        "mounts": [],
    }


def _members(stats: Stats) -> dict[int, Described]:
    shares = mapping_at(stats, "task.shares")
    rank = int(number_at(stats, "task.rank"))
    own: Described = {
        "rank": rank,
        "is_here": True,
        "address": "",
        "state": "this node" if mapping_at(stats, "task").get("answers") else "does not answer",
        "share_chunks": shares.get(
            str(rank), int(number_at(stats, "task.node_cache.share_chunks"))
        ),
        "held_chunks": int(number_at(stats, "task.node_cache.share_held_chunks")),
        "memory_bytes": int(number_at(stats, "task.node_cache.memory_bytes")),
        "memory_budget_bytes": int(number_at(stats, "task.node_cache.memory_budget_bytes")),
        "disk_bytes": int(number_at(stats, "task.node_cache.disk_used_bytes")),
    }
    found = {rank: own}
    for peer in mapping_at(stats, "task.peers").values():
        if isinstance(peer, Mapping) and isinstance(peer.get("rank"), int):
            found[peer["rank"]] = {
                "rank": peer["rank"],
                "is_here": False,
                "address": _text(str(peer.get("address"))),
                "state": {"closed": "answers", "open": "fails"}.get(
                    str(peer.get("state")), "tried"
                ),
                "share_chunks": shares.get(str(peer["rank"]), 0),
                "failed": int(number_at(peer, "failed") + number_at(peer, "timed_out")),
            }
    return found


def _shown_figures(figures: Described) -> Described:
    readers = sorted(list_at(figures, "readers"), key=lambda each: -number_at(each, "waited_s"))
    shown_readers = [
        {**each, "command": _text(str(each["command"]))} for each in readers[:READERS_SHOWN]
    ]
    left_out = {"readers", "plans"}
    kept = {name: value for name, value in figures.items() if name not in left_out}
    return {**kept, "readers": shown_readers}


def _plan(stream: Mapping[str, object]) -> Described:
    epoch = number_at(stream, "epoch")
    return {
        "name": _text(str(stream.get("name"))),
        "epoch": int(epoch) if epoch >= 0 else None,
        "position": int(number_at(stream, "position")),
        "length": int(number_at(stream, "length")),
        "files_per_s": round(number_at(stream, "entries_per_s"), 1),
        "tentative": bool(stream.get("tentative")),
    }


def _text(name: str) -> str:
    """Removes control characters from another user's name."""
    return shown(os.fsencode(name))

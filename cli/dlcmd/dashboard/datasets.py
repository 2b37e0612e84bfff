"""A repository on the dashboard: its datasets, with versions, sizes and holes.

The repository is listed seldom: a listing of a thousand datasets takes seconds of a processor, or
thousands of requests to a bucket. Kept versions and holes need a request for each dataset, so they
are fetched only for changed datasets, a few at a time.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from diesel_fs.errors import DieselError
from diesel_fs.names import shown
from diesel_fs.remote.open import open_configured
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.interface import Repository
from diesel_fs.settings import Settings
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.urls import shown_url

from .history import History
from .watched import Described, Watched

LIST_EVERY_S = 30.0
_CPU_SHARE, _WALL_SHARE = 0.01, 0.1
"""Listings take at most this part of a processor, and of the time: slow ones are repeated less
often than every `LIST_EVERY_S`."""

DETAILS_EVERY_S = 2.0
DETAILS_S = 0.2

HOLES_FILES_MAX = 250_000
"""Holes (bytes of replaced or deleted entries) are not counted in datasets with more files: that
could take this process's memory."""

VERSIONS_SHOWN = 8


class _Details(NamedTuple):
    """Facts about a dataset at `version`. `kept` counts the kept versions; `versions` describes the
    newest. `holes_bytes` is None if not counted. `problem` tells why facts are missing."""

    version: int
    versions: list[dict[str, object]]
    kept: int
    holes_bytes: int | None
    problem: str


class WatchedDatasets(Watched):
    least_s = DETAILS_EVERY_S
    late_s = 60.0

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._repository: Repository | None = None
        self._infos: list[DatasetInfo] = []
        self._details: dict[UUID, _Details] = {}
        self._pending: list[DatasetInfo] = []
        self._list_s = 0.0  # monotonic
        self.change = 0  # grows when a dataset or its details change
        super().__init__("datasets", History(()))

    def refresh(self) -> None:
        if time.monotonic() >= self._list_s:
            self._list()
        assert self._repository is not None
        until_s = time.monotonic() + DETAILS_S
        while self._pending and time.monotonic() < until_s:
            info = self._pending.pop(0)
            details = _details(self._repository, info)
            with self.lock:
                self._details[info.identity] = details
                self.change += 1

    def _list(self) -> None:
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        try:
            if self._repository is None:
                open_buckets_directly()
                self._repository = open_configured(self._settings)
            infos = self._repository.datasets()
        finally:
            wall_s, cpu_s = time.monotonic() - wall_s, time.thread_time() - cpu_s
            pause_s = max(LIST_EVERY_S, cpu_s / _CPU_SHARE, wall_s / _WALL_SHARE)
            self._list_s = time.monotonic() + pause_s
        known = {info.identity for info in infos}
        with self.lock:
            self.change += infos != self._infos
            self._infos = infos
            self._details = {key: each for key, each in self._details.items() if key in known}
        self._pending = [info for info in infos if self._is_unknown(info)]

    def _is_unknown(self, info: DatasetInfo) -> bool:
        details = self._details.get(info.identity)
        return details is None or details.version != (info.head.version if info.head else 0)

    def describe(self) -> Described:
        return {
            **self.standing(),
            "repository": shown(shown_url(self._settings.repository_url).encode()),
            "count": len(self._infos),
            "change": self.change,
        }

    def point(self) -> Mapping[str, float] | None:
        return None

    def all(self) -> Described:
        with self.lock:
            rows = [_row(info, self._details.get(info.identity)) for info in self._infos]
            return {"change": self.change, "datasets": rows}


def _details(repository: Repository, info: DatasetInfo) -> _Details:
    version = info.head.version if info.head else 0
    try:
        kept = repository.snapshots.kept(info.identity)
        is_small = info.head is not None and info.head.files <= HOLES_FILES_MAX
        holes_bytes = repository.reclaimable_bytes(info.name) if is_small else None
    except DieselError as error:
        return _Details(version, [], 0, None, error.message)
    shown_versions: list[dict[str, object]] = [
        {
            "version": str(each.version),
            "time": each.published_ns // 1_000_000_000,
            "files": each.files,
            "bytes": each.bytes,
        }
        for each in reversed(kept[-VERSIONS_SHOWN:])
    ]
    return _Details(version, shown_versions, len(kept), holes_bytes, "")


def _row(info: DatasetInfo, details: _Details | None) -> Described:
    head = info.head  # None if the metadata store does not know the dataset
    return {
        "name": info.name,
        "created": info.created_ns // 1_000_000_000,
        "version": str(head.version) if head else None,
        "files": head.files if head else None,
        "bytes": head.bytes if head else None,
        "chunks": head.chunks if head else None,
        "kept": details.kept if details else None,
        "versions": details.versions if details else [],
        "holes_bytes": details.holes_bytes if details else None,
        "problem": details.problem if details else "",
    }

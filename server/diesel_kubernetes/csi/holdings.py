"""Measures the share of each dataset that this node holds, in live mounts and in cache folders.

`VOLUMES.md` ("What a node reports") defines each figure. A snapshot in the state folder shows which
chunks below `--cache-root` a version has. If two places may count the same bytes, the larger figure
is used, so a share is a lower bound. For one thread.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.disk.listing import dataset_folders, list_files
from diesel_fs.errors import DieselError, FormatError
from diesel_fs.mounts.launcher import stats
from diesel_fs.repository.private_copies import list_copies, open_listed_copy

from ..reports import Held, HeldDataset, is_namespace
from .state import StateFolder
from .targets import MountTable

log = logging.getLogger("diesel.csi")

ANSWER_S = 5.0

UNNAMED = "-"
"""This stands for a namespace that kubelet has not named, as in paths of cache folders."""

SETTLED_NS = 2_000_000_000
"""A folder that had not changed for this time when it was listed is listed again only after its
mtime has changed."""

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class _ChunkTable:
    ids: bytes
    sizes: npt.NDArray[np.int64]

    def percent_of(self, chunks: Iterable[bytes]) -> int:
        there = set(chunks)
        ids = (self.ids[at : at + _ID_BYTES] for at in range(0, len(self.ids), _ID_BYTES))
        is_there = np.fromiter((each in there for each in ids), np.bool_, len(self.sizes))
        return _percent(int(self.sizes[is_there].sum()), int(self.sizes.sum()))


@dataclass(frozen=True, slots=True)
class _Folder:
    state: object
    """While this stays equal, nothing has changed; None: look again."""
    shares: Mapping[int, int]
    """Percentages by version."""
    is_unknown: bool
    """Whether it has chunks whose share of a version is not known."""


class NodeHoldings:
    """`cache_root` is empty if there are no cache folders."""

    def __init__(self, state: StateFolder, cache_root: str) -> None:
        self._state = state
        self._cache_root = cache_root
        self._tables: dict[tuple[UUID, int], _ChunkTable] = {}
        self._folders: dict[str, _Folder] = {}
        self._is_root_missing = False

    def measure(self) -> tuple[list[HeldDataset], bool]:
        """Returns also whether the datasets are all that the node holds."""
        found: dict[tuple[Held, int], HeldDataset] = {}
        is_complete = True
        for held in (*self._in_mounts(), *self._in_folders()):
            if held is None:
                is_complete = False
            elif (key := (held.key, held.version)) in found:
                found[key] = found[key].joined(held)
            else:
                found[key] = held
        # A place whose share is unknown may hold more than all others
        unknown = {each.key for each in found.values() if not each.version}
        datasets = [each for each in found.values() if each.key not in unknown or not each.version]
        return datasets, is_complete

    def _in_mounts(self) -> Iterator[HeldDataset | None]:
        """Yields None for a mount that does not report its share."""
        table = MountTable.read(self._state)
        for name in table.roots:
            namespace = self._state.namespace(name)
            if namespace is None or not is_namespace(namespace or UNNAMED):
                # A plugin of an earlier release has started it
                yield None
                continue
            try:
                figures = stats(self._state.root(name), deadline_s=ANSWER_S)
            except DieselError:
                yield None
            else:
                is_used = bool(table.binds.get(name))
                yield held_by_mount(namespace or UNNAMED, figures, is_used=is_used)

    def _in_folders(self) -> Iterator[HeldDataset | None]:
        """Yields a dataset for each version; None if the root of the cache folders cannot be
        read."""
        if not self._cache_root:
            return
        listed: dict[str, _Folder] = {}
        try:
            copies = list_copies(self._state.cache)
            for namespace, folder, identity in self._dataset_folders():
                own = {key[1]: path for key, path in copies.items() if key[0] == identity}
                with suppress(FileNotFoundError):
                    listed[folder] = found = self._look_into(folder, identity, own)
                    if found.is_unknown:
                        yield HeldDataset(namespace, identity, 0)
                    for version, share in found.shares.items():
                        yield HeldDataset(namespace, identity, version, share, share)
            self._is_root_missing = False
        except OSError as error:
            if not self._is_root_missing:
                log.warning("reports leave out what lies below --cache-root: %s", error)
            self._is_root_missing = True
            yield None
        self._folders = listed
        here = {os.path.basename(folder) for folder in listed}
        self._tables = {key: each for key, each in self._tables.items() if key[0].hex in here}

    def _dataset_folders(self) -> Iterator[tuple[str, str, UUID]]:
        for namespace in _subfolders(self._cache_root):
            if is_namespace(namespace):
                place = os.path.join(self._cache_root, namespace)
                for name in _subfolders(place):
                    for folder, identity in dataset_folders(Path(place, name)).items():
                        yield namespace, folder, identity

    def _look_into(self, folder: str, identity: UUID, copies: Mapping[int, Path]) -> _Folder:
        """`copies` has the paths of the dataset's snapshots, by version. Raises OSError."""
        changed_ns = os.stat(folder).st_mtime_ns
        state = changed_ns, sorted(copies.items())
        before = self._folders.get(folder)
        if before is not None and before.state == state:
            return before
        files = list_files(folder)
        tables = {version: self._table(identity, version, path) for version, path in copies.items()}
        shares = {
            version: table.percent_of(files.chunks)
            for version, table in tables.items()
            if table is not None
        }
        is_unknown = files.has_logs or bool(files.chunks and not shares)
        # Another change soon after this one may leave the same mtime
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        return _Folder(state if is_settled else None, shares, is_unknown)

    def _table(self, identity: UUID, version: int, path: Path) -> _ChunkTable | None:
        key = identity, version
        if key not in self._tables:
            try:
                snapshot = open_listed_copy(path)
            except (OSError, FormatError):
                return None
            if (snapshot.identity, snapshot.version) != key:
                return None
            ids, sizes = snapshot.columns.chunk_id.tobytes(), snapshot.chunk_sizes
            self._tables[key] = _ChunkTable(ids, sizes.astype(np.int64))
        return self._tables[key]


def held_by_mount(
    namespace: str, figures: Mapping[str, object], *, is_used: bool
) -> HeldDataset | None:
    """The share is the part of the dataset in the page cache, or in the node's part of the task's
    cache, whichever is larger. Returns None if the statistics name no dataset."""
    match figures:
        case {"identity": str(identity), "version": int(version)}:
            pass
        case _:
            return None
    share = 0
    match figures.get("residency"):
        case {"resident_bytes": int(part), "dataset_bytes": int(whole)}:
            share = _percent(part, whole)
    match figures.get("task"):
        case {
            "version": int(of_version),
            "node_cache": {"held_bytes": int(part), "dataset_bytes": int(whole)},
        } if of_version == version:
            share = max(share, _percent(part, whole))
    return HeldDataset(namespace, UUID(identity), version, share, is_used=is_used)


def _percent(part: int, whole: int) -> int:
    return min(100 * part // whole, 100) if whole > 0 else 0


def _subfolders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

"""The file system of a mount that follows its dataset: the current version, and retired ones.

After a switch, names lead to the new version, the *current* one. The version before is *retired*:
its open files are still served, until the kernel needs nothing of it any more.

`VersionedVfs` alone serves a native mount: each version has a tree of its own in the kernel, which
requests contents by version. If names are looked up here, all versions share one set of nodes
(`following.py`).

Concurrency: one trio task at a time, as in `tree/vfs.py`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ...format.snapshot.reader import Snapshot
from ...settings import READ_DEADLINE_S
from ..tree.attributes import Owner
from ..tree.vfs import ContentReader, MountHooks, Vfs

ReaderFactory = Callable[[], ContentReader]
"""Opens a reader of one version. Raises DieselError."""


RETIRED_READERS_MAX = 4
"""The most readers of retired versions that stay open, unless more are reading. They share the
memory for retired versions."""


class RetiredReaders:
    """The open readers of retired versions: the last used ones, and those that are reading."""

    def __init__(self) -> None:
        self._open: dict[LazyReader, None] = {}  # the last used one is last
        self._lock = threading.Lock()

    def used(self, reader: "LazyReader") -> None:
        """Closes the readers that have been unused for longest, if too many are open."""
        with self._lock:
            self._open.pop(reader, None)
            self._open[reader] = None
            too_many = list(self._open)[:-RETIRED_READERS_MAX]
            closed = [each for each in too_many if each.close_if_idle()]
            for each in closed:
                del self._open[each]

    def forget(self, reader: "LazyReader") -> None:
        with self._lock:
            self._open.pop(reader, None)


class LazyReader:
    """The reader of a retired version. A read, which is rare there, opens the version's real
    reader, which stays open for a while."""

    def __init__(self, open_reader: ReaderFactory, all_readers: RetiredReaders) -> None:
        self._open = open_reader
        self._all = all_readers
        self._reader: ContentReader | None = None
        self._lock = threading.Lock()
        self._reads = 0  # under way

    def read(self, index: int, offset: int, size: int) -> memoryview:
        with self._lock:
            if self._reader is None:
                self._reader = self._open()
            reader = self._reader
            self._reads += 1
        try:
            self._all.used(self)
            # A copy, since the real reader may be closed soon
            return memoryview(bytes(reader.read(index, offset, size)))
        finally:
            with self._lock:
                self._reads -= 1

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        return None

    def stats(self) -> dict[str, int]:
        reader = self._reader
        return {} if reader is None else reader.stats()

    def close_if_idle(self) -> bool:
        """Closes the real reader, unless a read is under way. Returns whether it is closed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._reads:
                return False
            reader, self._reader = self._reader, None
        finally:
            self._lock.release()
        if reader is not None:
            reader.close()
        return True

    def close(self) -> None:
        self._all.forget(self)
        if self._reader is not None:
            self._reader.close()


class VersionVfs(Vfs):
    """Shares the counters and the thread limit of the whole mount."""

    def __init__(self, mount: Vfs, snapshot: Snapshot, reader: ContentReader) -> None:
        super().__init__(
            snapshot, reader, mount.owner, read_deadline_s=mount._deadline_s, clock=mount._clock
        )
        self.reads, self.requests, self._threads = mount.reads, mount.requests, mount._threads
        self.waits = mount.waits
        self._is_needed = True

    @property
    def is_needed(self) -> bool:
        return self._is_needed or self.waiting > 0

    def end(self) -> None:
        """Notes that the kernel will request nothing more of this version."""
        self._is_needed = False

    def retire(self, reopen: ReaderFactory, others: RetiredReaders) -> ContentReader:
        """Makes later reads open another reader by `reopen`. Returns the present reader, which the
        caller closes."""
        reader, self._reader = self._reader, LazyReader(reopen, others)
        return reader


class VersionedVfs(Vfs):
    def __init__(
        self,
        snapshot: Snapshot,
        reader: ContentReader,
        owner: Owner,
        hooks: MountHooks = MountHooks(),  # noqa: B008  # it is frozen
        *,
        follow_stats: Callable[[], Mapping[str, object]] = dict,
        read_deadline_s: float = READ_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            snapshot, reader, owner, hooks, read_deadline_s=read_deadline_s, clock=clock
        )
        self.current = self._first_version(snapshot, reader)
        self._retired: Sequence[VersionVfs] = ()  # the newest first
        self._retired_readers = RetiredReaders()
        self._follow_stats = follow_stats
        self._since_s = time.time()
        self._switches = 0

    def _first_version(self, snapshot: Snapshot, reader: ContentReader) -> VersionVfs:
        return VersionVfs(self, snapshot, reader)

    @property
    def snapshots(self) -> list[Snapshot]:
        """The current version's comes first."""
        return [self.snapshot, *(each.snapshot for each in self._retired)]

    def begin_version(self, new: VersionVfs, reopen: ReaderFactory) -> ContentReader:
        """Makes `new` the current version, and retires the version before, whose later reads open a
        reader by `reopen`. Returns the reader that it had until now: close it after
        `drain_retired`."""
        old_reader = self.current.retire(reopen, self._retired_readers)
        self._retired = self.current, *self._retired
        self.current = new
        self.snapshot, self._reader = new.snapshot, new._reader
        self._hidden.switch_version(new.snapshot)
        self._switches += 1
        self._since_s = time.time()
        self.drop_unused_versions()
        return old_reader

    async def drain_retired(self) -> None:
        """Waits until no request waits for a retired version."""
        for each in self._retired:
            await each.drain()

    def drop_unused_versions(self) -> None:
        unused = [each for each in self._retired if not each.is_needed]
        self._retired = tuple(each for each in self._retired if each not in unused)
        for each in unused:
            closing = threading.Thread(target=each.close, daemon=True)
            closing.start()  # closing may wait for a read of a dead store

    def stats(self) -> dict[str, object]:
        follow = {
            "since": round(self._since_s, 3),
            "switches": self._switches,
            "retired_versions": [each.snapshot.version for each in self._retired],
            **self._follow_stats(),
        }
        return {**super().stats(), "follow": follow}

    def close(self) -> None:
        for each in (self.current, *self._retired):
            each.close()

"""`.diesel`: the folder in a mount that has statistics, lists of paths and the control socket.

Programs reach `.diesel` by name, but the root does not list it, so that it is no part of the
dataset. A file in it gets a new node (inode number) if and only if its content changes, because the
kernel keeps the pages of a node. There are two kinds of files:

- A **generated file** (`stats`, `snapshot`; class `HiddenFile`) is made whole when it is looked up.
- A **list** (`filelist`, `shuffle/...`) is an order of the dataset's files as text. Its node is a
  hash of its name and version, and its size can be computed. The content is made at the first READ,
  one list at a time. If memory is short, lists that no read waits for are dropped, and made again
  when needed.

Concurrency: trio, one thread. `lookup`, `listing` and `read` may wait. The threads that make lists
use nothing but the snapshot.
"""

import errno
import logging
import math
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio
from xxhash import xxh3_64_intdigest

from ...errors import UsageError
from ...format.entries import Bytes
from ...format.snapshot.reader import Snapshot
from ...orders.path_lists import ListName, PathLists
from ...orders.shuffle import GROUP_SIZE_DEFAULT
from .attributes import (
    ABSENT_NOW,
    FOREVER_S,
    HIDDEN_ROOT,
    ROOT,
    Attributes,
    FuseErrno,
    Listing,
    Owner,
)

log = logging.getLogger("diesel.mount")

LISTS_BYTES_MAX = 512 << 20
"""Memory for contents of lists: ten lists of 1.28 million paths. A longer list cannot be read."""

SHUFFLE, SHUFFLE_NUL, CONTROL = b"shuffle", b"shuffle0", b"control"
FILELIST, FILELIST_NUL = b"filelist", b"filelist0"

_SHUFFLE_NODE, _SHUFFLE_NUL_NODE, _CONTROL_NODE = range(HIDDEN_ROOT + 1, HIDDEN_ROOT + 4)
_FILES_FROM = HIDDEN_ROOT + 1024  # nodes of generated files, ascending
_LISTS_FROM = HIDDEN_ROOT + (1 << 61)  # nodes of lists, by hash
_LIST_BITS = (1 << 60) - 1
_NODES_SWEPT = 4096
"""If there are this many nodes, those that the kernel does not know are removed: an interrupted
lookup leaves a node that no FORGET request of the kernel will free."""
_FOLDERS = {SHUFFLE: _SHUFFLE_NODE, SHUFFLE_NUL: _SHUFFLE_NUL_NODE}


@dataclass(frozen=True, slots=True)
class HiddenFile:
    """Lookups within `max_age_s` after `content` was called get the same bytes."""

    content: Callable[[], Bytes]
    max_age_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ListRef:
    """A list that a program looks up or reads, as `filelist` (`by_filelist`) or by its own name."""

    name: ListName
    by_filelist: bool
    node: int
    version: int  # of the dataset


class ListObserver:
    """Learns which lists programs read, and so which files they will read next.

    Here the calls do nothing, and `filelist` is always the same list. The subclass in
    `plans/list_plans.py` makes plans of what it learns.
    """

    async def current_list(self) -> ListName:
        """The list that `filelist` shows now. May wait a moment to learn which files were
        opened."""
        return ListName(0, 0, GROUP_SIZE_DEFAULT)

    async def on_lookup(self, ref: ListRef) -> None:
        """Called when a list that was read is looked up again, perhaps to be read again."""

    def on_read(self, ref: ListRef) -> None:
        """Called when a program begins to read a list."""

    def stats(self) -> dict[str, object]:
        """The value of `lists` in `.diesel/stats`."""
        return {}


@dataclass(slots=True)
class _FileVersion:
    node: int
    name: bytes
    content: memoryview
    made_s: float
    mtime_ns: int
    lookup_count: int = 0  # how often the kernel got the node, minus how often it dropped it

    @property
    def size(self) -> int:
        return len(self.content)


@dataclass(slots=True)
class _ListNode:
    """A list that the kernel knows; its content may not be in memory."""

    node: int
    ref: ListRef
    paths: PathLists  # of its version
    nul: bool  # NUL bytes end the paths, not newlines
    size: int
    mtime_ns: int
    lookup_count: int = 0
    was_read: bool = False
    waiting: int = 0  # reads that wait for the content
    lock: trio.Lock = field(default_factory=trio.Lock)


class HiddenFolder:
    def __init__(
        self,
        snapshot: Snapshot,
        files: Mapping[bytes, HiddenFile],
        owner: Owner,
        *,
        list_observer: ListObserver | None = None,
        control_path: Callable[[], bytes] = bytes,
        clock: Callable[[], float] = time.monotonic,
        lists_bytes_max: int = LISTS_BYTES_MAX,
    ) -> None:
        """`control_path` returns the target of the link `control`, which exists unless the target
        is empty."""
        self._files = files
        self._owner = owner
        self._observer = list_observer or ListObserver()
        self._control_path = control_path
        self._clock = clock
        self._lists_bytes_max = lists_bytes_max
        self._paths = PathLists(snapshot)
        self._version = snapshot.version
        self._mtime_ns = snapshot.stat(0).mtime_ns
        self._current: dict[bytes, _FileVersion] = {}  # of generated files, by name
        self._nodes: dict[int, _FileVersion | _ListNode] = {}
        self._next_node = _FILES_FROM
        self._contents: OrderedDict[int, memoryview] = OrderedDict()  # of lists
        self._contents_bytes = 0
        self._generator_limiter = trio.CapacityLimiter(1)

    def switch_version(self, snapshot: Snapshot) -> None:
        """From now on, names lead to contents of this version; known nodes keep theirs."""
        self._paths = PathLists(snapshot)
        self._version = snapshot.version
        for each in tuple(self._current.values()):
            del self._current[each.name]
            if each.lookup_count <= 0:
                self._forget_node(each)

    # names ----------------------------------------------------------------------------------------

    async def lookup(self, folder: int, name: bytes) -> Attributes:
        """`ABSENT_NOW` if there is no such name."""
        if folder == HIDDEN_ROOT:
            if name in (FILELIST, FILELIST_NUL):
                return await self._list(
                    await self._observer.current_list(), by_filelist=True, nul=name == FILELIST_NUL
                )
            if name in _FOLDERS:
                return self.attributes(_FOLDERS[name])
            if name == CONTROL:
                return self.attributes(_CONTROL_NODE) if self._control_path() else ABSENT_NOW
            found = self._file_version(name)
            return ABSENT_NOW if found is None else self.attributes(found.node)
        if folder in (_SHUFFLE_NODE, _SHUFFLE_NUL_NODE):
            wanted = ListName.parse(name)
            if wanted is not None:
                return await self._list(wanted, by_filelist=False, nul=folder == _SHUFFLE_NUL_NODE)
        return ABSENT_NOW

    def attributes(self, node: int) -> Attributes:
        """Raises FuseErrno(ESTALE) for an unknown node."""
        if node in (HIDDEN_ROOT, _SHUFFLE_NODE, _SHUFFLE_NUL_NODE):
            mode = stat.S_IFDIR | (0o555 & ~self._owner.umask)
            return Attributes(node, mode, 0, self._mtime_ns, FOREVER_S)
        if node == _CONTROL_NODE:
            size = len(self._control_path())
            return Attributes(node, stat.S_IFLNK | 0o777, size, self._mtime_ns, FOREVER_S)
        found = self._node(node)
        mode = stat.S_IFREG | (0o444 & ~self._owner.umask)
        return Attributes(node, mode, found.size, found.mtime_ns, 0.0)

    def link_target(self, node: int) -> bytes:
        """The target of `control`. Raises FuseErrno(EINVAL) for any other node."""
        target = self._control_path() if node == _CONTROL_NODE else b""
        if not target:
            raise FuseErrno(errno.EINVAL)
        return target

    def parent(self, node: int) -> int:
        return ROOT if node == HIDDEN_ROOT else HIDDEN_ROOT

    async def listing(self, folder: int) -> Listing:
        """`shuffle` lists nothing, since every order has a name there."""
        names: list[bytes] = []
        if folder == HIDDEN_ROOT:
            names = sorted([*self._files, *_FOLDERS, FILELIST, FILELIST_NUL])
            names = sorted([*names, CONTROL]) if self._control_path() else names
        found = [await self.lookup(folder, name) for name in names]
        return Listing(
            0,
            names,
            [each.node for each in found],
            [each.mode for each in found],
            [each.size for each in found],
            [each.mtime_ns for each in found],
            0.0,
        )

    def count_lookup(self, node: int) -> None:
        if found := self._nodes.get(node):
            found.lookup_count += 1

    def forget(self, node: int, count: int) -> None:
        """Frees a node without a lookup."""
        if found := self._nodes.get(node):
            found.lookup_count -= count
            if found.lookup_count <= 0:
                self._forget_node(found)

    def _forget_node(self, found: "_FileVersion | _ListNode") -> None:
        if isinstance(found, _FileVersion):
            if self._current.get(found.name) is not found:
                del self._nodes[found.node]
        elif not found.waiting:
            del self._nodes[found.node]
            self._drop_content(found.node)

    def _node(self, node: int) -> "_FileVersion | _ListNode":
        try:
            return self._nodes[node]
        except KeyError:
            raise FuseErrno(errno.ESTALE) from None

    def stats(self) -> dict[str, object]:
        return {
            **self._observer.stats(),
            "held": len(self._contents),
            "held_bytes": self._contents_bytes,
        }

    # generated files ------------------------------------------------------------------------------

    def _file_version(self, name: bytes) -> _FileVersion | None:
        """The present content, made again if it is too old; None if there is no such file."""
        file = self._files.get(name)
        if file is None:
            return None
        current = self._current.get(name)
        if current is not None and self._clock() < current.made_s + file.max_age_s:
            return current
        content = memoryview(file.content()).cast("B")
        if current is not None and content == current.content:
            current.made_s = self._clock()
            return current
        if current is not None and current.lookup_count <= 0:
            del self._nodes[current.node]
        made = _FileVersion(self._next_node, name, content, self._clock(), time.time_ns())
        self._next_node += 1
        self._current[name] = self._nodes[made.node] = made
        return made

    # lists ----------------------------------------------------------------------------------------

    async def _list(self, name: ListName, *, by_filelist: bool, nul: bool) -> Attributes:
        paths, version = self._paths, self._version
        digest = xxh3_64_intdigest(f"{version},{name},{by_filelist:d},{nul:d}".encode())
        node = _LISTS_FROM + (digest & _LIST_BITS)
        while True:
            found = self._nodes.get(node)
            ref = ListRef(name, by_filelist, node, version)
            if found is None:
                size = await trio.to_thread.run_sync(
                    paths.size, name, abandon_on_cancel=True, limiter=self._generator_limiter
                )
                made = _ListNode(node, ref, paths, nul, size, time.time_ns())
                self._sweep()
                found = self._nodes.setdefault(node, made)  # or that of another lookup
            if isinstance(found, _ListNode) and (found.ref, found.nul) == (ref, nul):
                break
            node += 1  # another list has the same hash, which is rare
        if found.was_read:
            found.was_read = False
            await self._observer.on_lookup(found.ref)
            self._nodes.setdefault(node, found)
        return Attributes(
            node, stat.S_IFREG | (0o444 & ~self._owner.umask), found.size, found.mtime_ns, 0.0
        )

    def _sweep(self) -> None:
        if len(self._nodes) >= _NODES_SWEPT:
            for each in tuple(self._nodes.values()):
                if each.lookup_count <= 0:
                    self._forget_node(each)

    def read_nowait(self, node: int, offset: int, size: int) -> Bytes | None:
        """The bytes of a file, fewer at its end; None if `read` must make the content first."""
        found = self._node(node)
        if isinstance(found, _FileVersion):
            return found.content[offset : offset + size]
        if offset == 0:
            self._observer.on_read(found.ref)
        if offset >= found.size:
            return b""
        content = self._contents.get(node)
        if content is None:
            return None
        self._contents.move_to_end(node)
        found.was_read = True
        return content[offset : offset + size]

    async def read(self, node: int, offset: int, size: int) -> Bytes:
        """The bytes of a list, fewer at its end. Raises FuseErrno: ENOMEM if the content would take
        too much memory, EILSEQ if a path in a list of lines has a newline."""
        found = self._node(node)
        assert isinstance(found, _ListNode)
        found.waiting += 1
        try:
            async with found.lock:
                content = self._contents.get(node)
                if content is None:
                    content = await self._make(found)
            found.was_read = True
            return content[offset : offset + size]
        finally:
            found.waiting -= 1
            if found.lookup_count <= 0 and not found.waiting and self._nodes.get(node) is found:
                self._forget_node(found)

    async def _make(self, found: _ListNode) -> memoryview:
        self._reserve(found)
        try:
            text = await trio.to_thread.run_sync(
                lambda: found.paths.text(found.ref.name, nul=found.nul),
                abandon_on_cancel=True,
                limiter=self._generator_limiter,
            )
        except UsageError as error:
            self._contents_bytes -= found.size
            log.error("cannot make the list %s: %s", found.ref.name, error)
            raise FuseErrno(errno.EILSEQ) from None
        except BaseException:
            self._contents_bytes -= found.size
            raise
        content = self._contents[found.node] = text.data.cast("B")
        if len(content) != found.size:
            self._drop_content(found.node)
            raise AssertionError(f"a list of {len(content)} bytes instead of {found.size}")
        return content

    def _reserve(self, found: _ListNode) -> None:
        """Counts memory for a list, and drops others if needed. Raises FuseErrno(ENOMEM)."""
        over = self._contents_bytes + found.size - self._lists_bytes_max
        for node in tuple(self._contents):
            if over <= 0:
                break
            holder = self._nodes.get(node)
            if not isinstance(holder, _ListNode) or not holder.waiting:
                over -= len(self._contents[node])
                self._drop_content(node)
        if over > 0:
            log.error(
                "cannot make the list %s: its %d bytes do not fit beside other lists that are being"
                " read (at most %d in all)",
                found.ref.name,
                found.size,
                self._lists_bytes_max,
            )
            raise FuseErrno(errno.ENOMEM)
        self._contents_bytes += found.size

    def _drop_content(self, node: int) -> None:
        content = self._contents.pop(node, None)
        if content is not None:
            self._contents_bytes -= len(content)

"""From lists to plans: who reads a list will read the files that it names.

Owned here: which epoch `.diesel/filelist` is of, and what the helper is told of lists. Not owned:
the lists (`mounts/dot_diesel.py`), what becomes of the streams (`commands.py`, in the helper).

The list stays that of an epoch until somebody has read its files to the end, as far as is seen: by
the helper, from the opens of marker files (`mounts/prefetch/stream_tracker.py`); where there is no
helper, by the OPEN requests of the session, once the last file and half of those before it have
been opened.

Concurrency: trio, in the server; only `current_list` and `on_lookup` wait, and not for long.
"""

from dataclasses import replace

from xxhash import xxh3_64_hexdigest

from ...net.messages import Message
from ...orders.path_lists import ListName
from ...orders.shuffle import SEED_MAX
from ..dot_diesel import ListRef
from ..prefetch.link import WorkerLink

LOOK_DEADLINE_S = 1.0
"""How long a look at a list waits for the helper, which may be fetching a chunk. Without its answer
a program that reads the list again at once could get the order that it has just come through."""

FORGET_DEADLINE_S = 0.2
"""Without this one a reading goes unnoticed, which costs a plan and nothing else."""

FILELIST_STREAM = "filelist"


def stream_name(ref: ListRef) -> str:
    """The stream of those who read a list, the same for all its epochs."""
    if ref.by_filelist:
        return FILELIST_STREAM
    name = ref.name
    text = f"{name.seed}.{name.group}.{name.rank}.{name.world}"
    return f"shuffle:{text if len(text) <= 48 else xxh3_64_hexdigest(text.encode())}"


class ListPlans:
    """The `ListObserver` of a mount's lists."""

    def __init__(self, seed: int, group_size: int, version: int) -> None:
        self._link: WorkerLink | None = None
        self._name = ListName(seed, 0, group_size)
        self._version = version
        self._is_read = False  # the list of this epoch
        self._tail: frozenset[int] = frozenset()
        self._last = -1
        self._opened: set[int] = set()

    def stats(self) -> dict[str, object]:
        """Which list `.diesel/filelist` is."""
        return {"seed": self._name.seed, "group_size": self._name.group, "epoch": self._name.epoch}

    def connect_worker(self, link: WorkerLink) -> None:
        """The helper has begun: it is told of lists from now on."""
        self._link = link

    def switch_version(self, version: int) -> None:
        """The mount goes over to another version: the list is of the same epoch, of its files."""
        self._version = version
        self._is_read = False
        self._tail = frozenset()
        self._opened.clear()

    async def current_list(self) -> ListName:
        """The list that `.diesel/filelist` is now."""
        if self._is_read and self._link is not None:
            asked = self._name
            answer = await self._ask(
                {"do": "list looked up", "stream": FILELIST_STREAM}, LOOK_DEADLINE_S
            )
            epoch = answer.get("epoch")
            if isinstance(epoch, int) and asked == self._name:
                self._begin(epoch)
        return self._name

    async def on_lookup(self, ref: ListRef) -> None:
        """Has the kernel forget the list's pages: so its next reading is a READ."""
        await self._ask({"do": "forget", "node": ref.node}, FORGET_DEADLINE_S)

    def on_read(self, ref: ListRef) -> None:
        """Its reader will probably read the files that it names, unless they are of old."""
        if ref.version != self._version:
            return
        if ref.by_filelist and ref.name == self._name:
            self._is_read = True
        said: Message = {"do": "list read", "stream": stream_name(ref), "list": str(ref.name)}
        if self._link is not None:
            self._link.send(said)

    def on_generated(self, ref: ListRef, tail: list[int]) -> None:
        """From here on the opens of its last files count."""
        is_now = ref.version == self._version and ref.name == self._name
        if ref.by_filelist and is_now and not self._tail:
            self._tail = frozenset(tail)
            self._last = tail[-1] if tail else -1
            self._opened.clear()

    def on_open(self, entry: int) -> None:
        """A session that is asked for each open has been."""
        if entry in self._tail:
            self._opened.add(entry)
            if self._last in self._opened and 2 * len(self._opened) >= len(self._tail):
                self._begin(self._name.epoch + 1)

    def _begin(self, epoch: int) -> None:
        name = self._name
        if name.epoch < epoch <= SEED_MAX:
            self._name = replace(name, epoch=epoch)
            self._is_read = False
            self._tail = frozenset()

    async def _ask(self, message: Message, deadline_s: float) -> Message:
        if self._link is None:
            return {}
        return await self._link.request(message, deadline_s) or {}

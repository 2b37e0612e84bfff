"""Turns lists that programs read into plans: a program that reads a list will read its files.

A mount offers lists of all files in shuffled orders (`mounts/tree/dot_diesel.py`):
`.diesel/filelist`, and `.diesel/shuffle/<name>` for named parameters. When a program reads one, the
prefetch worker announces its order as a stream (`commands.py`).

`.diesel/filelist` shows the next epoch once the files of the current one have been read to the end.
The worker knows that, since it watches the opens of some files. If the worker has ended, the list
stays the same.

Concurrency: trio, in the server of the mount. Only `current_list` and `on_lookup` wait, at most for
the deadlines below.
"""

from dataclasses import replace

from xxhash import xxh3_64_hexdigest

from ...net.messages import Message
from ...orders.path_lists import ListName
from ...orders.shuffle import SEED_MAX
from ..prefetch.link import WorkerLink
from ..tree.dot_diesel import ListObserver, ListRef

LOOK_DEADLINE_S = 1.0
"""How long a look-up of `.diesel/filelist` waits for the prefetch worker, which may be fetching a
chunk. Without the worker's answer, a program that reads the list again may get the same order."""

FORGET_DEADLINE_S = 0.2
"""How long a look-up waits until the kernel has dropped its pages of the list. If it takes longer,
the next reading of the list may stay unnoticed, and nothing is pushed ahead for it."""

FILELIST_STREAM = "filelist"


def stream_name(ref: ListRef) -> str:
    """The same for all epochs of a list."""
    if ref.by_filelist:
        return FILELIST_STREAM
    name = ref.name
    text = f"{name.seed}.{name.group}.{name.rank}.{name.world}"
    return f"shuffle:{text if len(text) <= 48 else xxh3_64_hexdigest(text.encode())}"


class ListPlans(ListObserver):
    def __init__(self, seed: int, group_size: int, version: int) -> None:
        self._link: WorkerLink | None = None
        self._name = ListName(seed, 0, group_size)  # of the epoch that `.diesel/filelist` shows
        self._version = version
        self._is_read = False  # the list of this epoch, by some program

    def stats(self) -> dict[str, object]:
        return {"seed": self._name.seed, "group_size": self._name.group, "epoch": self._name.epoch}

    def connect_worker(self, link: WorkerLink) -> None:
        self._link = link

    def switch_version(self, version: int) -> None:
        """The list keeps its epoch, and has the files of that version."""
        self._version = version
        self._is_read = False

    async def current_list(self) -> ListName:
        if self._is_read and self._link is not None:
            name_before = self._name
            answer = await self._request(
                {"do": "list looked up", "stream": FILELIST_STREAM}, LOOK_DEADLINE_S
            )
            epoch = answer.get("epoch")
            if isinstance(epoch, int) and name_before == self._name:
                self._begin(epoch)
        return self._name

    async def on_lookup(self, ref: ListRef) -> None:
        """Makes the kernel drop the list's pages, so that the next reading is a READ request."""
        await self._request({"do": "forget", "node": ref.node}, FORGET_DEADLINE_S)

    def on_read(self, ref: ListRef) -> None:
        """Makes the worker announce the order, unless the list belongs to an old version."""
        if ref.version != self._version:
            return
        if ref.by_filelist and ref.name == self._name:
            self._is_read = True
        message: Message = {"do": "list read", "stream": stream_name(ref), "list": str(ref.name)}
        if self._link is not None:
            self._link.send(message)

    def _begin(self, epoch: int) -> None:
        """Shows the list of a later epoch."""
        name = self._name
        if name.epoch < epoch <= SEED_MAX:
            self._name = replace(name, epoch=epoch)
            self._is_read = False

    async def _request(self, message: Message, deadline_s: float) -> Message:
        if self._link is None:
            return {}
        return await self._link.request(message, deadline_s) or {}

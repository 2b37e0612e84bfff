"""The side of a session that serves the prefetch worker.

The session reports misses (READs of files that were not in the page cache) and files that the
kernel has forgotten. It holds the READ of a file that the worker pushes soon (`push_status.py`).

Concurrency: the session's thread. Only `held_or_read` waits.
"""

from collections.abc import Awaitable, Callable, Sequence

from ...cache.waiting import WaitCause, waiting_for
from ...format.entries import Bytes
from ..tree.attributes import HIDDEN_ROOT
from ..tree.vfs import Vfs
from .push_status import HeldBytes, HeldRead, PushStatusMap


def _ignore(_: object) -> None: ...


class WorkerSide:
    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._reads_failed = False
        self._on_miss: Callable[[int], None] = _ignore
        self.on_forget: Callable[[Sequence[int]], None] = _ignore
        self.push_status: PushStatusMap | None = None

    def attach(
        self,
        on_miss: Callable[[int], None],
        on_forget: Callable[[Sequence[int]], None],
        push_status: PushStatusMap,
    ) -> None:
        """Makes the session call `on_miss` with each entry that was missed, and `on_forget` with
        the entries that the kernel has forgotten."""
        self._on_miss, self.on_forget, self.push_status = on_miss, on_forget, push_status
        if self._reads_failed:
            push_status.note_failed_read()

    def detach(self) -> None:
        """The worker has ended: nothing is reported to it, and no READ is held."""
        self._on_miss, self.on_forget, self.push_status = _ignore, _ignore, None

    def report_miss(self, node: int) -> None:
        """Reports the READ of a file, unless the worker wants no report now."""
        if self.push_status is not None and node < HIDDEN_ROOT and self.push_status.takes_miss():
            self._on_miss(node - 1)

    def note_failed_read(self) -> None:
        self._reads_failed = True
        if self.push_status is not None:
            self.push_status.note_failed_read()

    def try_hold(self, unique: int, node: int, offset: int, size: int) -> HeldRead | None:
        """Begins to hold the READ with the number `unique`; None if the worker does not push the
        file soon."""
        if self.push_status is None:
            return None

        def wanted() -> HeldBytes:
            left = max(self._vfs.attributes(node).size - offset, 0)
            return HeldBytes(unique, offset, min(size, left))

        return self.push_status.try_hold(node - 1, wanted)

    async def held_or_read(
        self, held: HeldRead, read: Callable[[], Awaitable[Bytes | Sequence[Bytes]]]
    ) -> Bytes | Sequence[Bytes]:
        """The bytes that the worker hands over, or else those of `read`. Until then the worker does
        not push the file, since it would wait for the page that the READ has locked."""
        self._vfs.reads["held"] += 1
        try:
            with waiting_for(WaitCause.PREFETCH):
                found = await held.wait()
            if found is None:
                return await read()
        finally:
            held.end()
        self._vfs.note_handed_over(len(found))
        return found

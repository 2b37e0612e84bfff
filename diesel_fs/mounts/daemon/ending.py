"""Ends a mount: after a signal, when the supervisor was killed, or when serving has failed.

At `UNMOUNT_SIGNAL` the server unmounts (lazily if the mount is in use), lets reads under way finish
for the grace period, and ends the session; at a second one it ends the session at once.

Concurrency: trio, in the server's thread. Unmounting may wait until requests are answered, so a
thread does it while the session goes on answering.
"""

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import trio

from ...errors import DieselError
from ...system import syscalls
from ..mountpoints.mountpoint import end_connection, mounted_at, place_of, unmount
from ..mountpoints.processes import free_killed, killed_servants_of
from ..sessions.native import NativeSession
from ..sessions.session import Session
from ..tree.vfs import Vfs

log = logging.getLogger("diesel.mount")

GRACE_S = 1.5
"""How long reads under way may take after a signal: the process ends within 2 s."""

NEXT_READ_S = 0.02
"""In a native mount, the longest time between two READ requests of one read(2)."""

UNMOUNT_SIGNAL = signal.SIGUSR1
"""The supervisor sends it once to unmount, and twice to end at once. A SIGTERM from another process
unmounts as well, but does not count as one of the two: that process may have signalled the
supervisor, too."""

ORPHANED_SIGNAL = signal.SIGUSR2
"""The kernel sends it when the supervisor was killed. The server then aborts the connection, since
the worker may wait for a page lock. Before there is a mount this signal ends the process."""


class MountEnd:
    def __init__(self, mountpoint: str, session: Session, vfs: Vfs, grace_s: float) -> None:
        found = mounted_at(mountpoint)
        self.device = found.device if found else ""
        """The device number of the connection; empty if the mount has ended already."""
        self.is_ready = False
        """Whether the mount was reported as ready."""
        self._mountpoint = mountpoint
        self._session = session
        self._vfs = vfs
        self._grace_s = grace_s
        self._mount_id = found.tree.mount_id if found else 0  # a native session has its own
        self._abort_file = syscalls.open_abort(self.device)  # -1: this user may not abort

    async def handle_signals(
        self,
        signals: AsyncIterator[int],
        scope: trio.CancelScope,
        release: Callable[[], None],
    ) -> None:
        """Waits for a signal, calls `release`, which ends everything that keeps the mount busy,
        unmounts, and cancels `scope`, in which the session serves."""
        first = await anext(signals)
        if first == ORPHANED_SIGNAL:
            self._abort()
            return
        log.info("unmounting %s", self._mountpoint)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._unmount_and_end, scope, release)
            was_signalled = first == UNMOUNT_SIGNAL
            async for number in signals:
                if number == ORPHANED_SIGNAL:
                    self._abort()
                if was_signalled and number == UNMOUNT_SIGNAL:
                    break
                was_signalled = was_signalled or number == UNMOUNT_SIGNAL
            log.warning("a second signal: ending at once")
            with suppress(DieselError):
                self._unmount(lazy=True)
            scope.cancel()

    def unmount_rest(self) -> None:
        """Unmounts the trees of a native mount after its session has ended by itself.

        A FUSE mount that ends by itself is mounted nowhere any more; its folder and the number of
        its device may already belong to another mount.
        """
        if isinstance(self._session, NativeSession) and self._session.has_trees:
            self.unmount_now()

    def unmount_now(self) -> None:
        """Unmounts when nothing answers any more. Ends the connection first, since unmounting a
        native tree would wait for READs under way."""
        if isinstance(self._session, NativeSession):
            place = self._place() or self._mountpoint
            end_connection(self._abort_file, place, self.device)
        with suppress(DieselError):
            self._unmount(lazy=True)

    def _abort(self) -> None:
        log.critical("the supervisor was killed: ending the mount")
        if self._abort_file >= 0:
            os.write(self._abort_file, b"1")
        else:
            self._session.close()
            for pid in killed_servants_of(self._mountpoint):
                free_killed(pid, self._grace_s)
        if not self.is_ready:  # the starter may have checked already whether it is mounted
            with suppress(DieselError):
                self._unmount(lazy=True)
        os._exit(1)

    async def _unmount_and_end(self, scope: trio.CancelScope, release: Callable[[], None]) -> None:
        release()
        with trio.move_on_after(self._grace_s):
            try:
                await trio.to_thread.run_sync(self._unmount, abandon_on_cancel=True)
            except DieselError as error:
                log.warning("%s: unmounting it lazily", error)
                with suppress(DieselError):
                    await trio.to_thread.run_sync(self._unmount, True, abandon_on_cancel=True)
            await self._drain()
        scope.cancel()

    async def _drain(self) -> None:
        """In a native mount, the kernel sends the READ requests of one read(2) one after the
        other."""
        await self._vfs.drain()
        answered = -1
        while isinstance(self._session, NativeSession) and self._vfs.requests["read"] != answered:
            answered = self._vfs.requests["read"]
            await trio.sleep(NEXT_READ_S)
            await self._vfs.drain()

    def _unmount(self, lazy: bool = False) -> None:
        """Unmounts nothing that was mounted on top of this mount since."""
        while (place := self._place()) is not None:  # twice during a switch of trees
            unmount(place, lazy=lazy)

    def _place(self) -> str | None:
        """The path of the mount; None if it is unmounted, or lies below another mount."""
        session = self._session
        mount_id = session.mount_id if isinstance(session, NativeSession) else self._mount_id
        return place_of(mount_id, self.device, self._mountpoint)

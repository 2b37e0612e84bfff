"""The interface of the FUSE sessions, their mount options, and their wait for requests.

A session turns the kernel's requests at one mount point into calls of a `Vfs`, and the results into
replies. It does not unmount: the server process does that, and `serve` returns once the kernel has
closed the connection.

Concurrency: `mount` is called before trio runs, `serve` in trio, and `close` after `serve`.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import trio

from ...names import check_dataset_name
from ..mountpoints.mountpoint import SUBTYPE
from ..tree.vfs import Vfs
from .worker_side import WorkerSide

SLICE_S = 0.002
"""How long requests are answered before trio's loop gets a turn, which costs as much as a reply."""

SPIN_S = 0.000_05
"""How long a session looks for the next request after a reply without sleeping. To wake up on
another processor takes about as long: with this, small files were read 1.7 times as fast on two
virtual processors, with no more processor time. If a program works between files, this time is
wasted once or twice a file."""

POLL_S = 0.001
"""How long poll(2) then waits before trio does. It counts milliseconds, so this is the shortest."""


def mount_options(
    dataset: str, version: int, *, allow_other: bool = False, follows: bool = False
) -> Sequence[str]:
    """The mount's source is `DATASET@VERSION`, or with `follows`, as the version will change,
    `DATASET`.

    The only text from a user here is the dataset's name. It has neither comma nor backslash, so it
    cannot become an option. Without `noatime` the kernel would request attributes again after
    each read. Raises UsageError.
    """
    name = check_dataset_name(dataset)
    source = name if follows else f"{name}@{version}"
    fixed = ["ro", "nosuid", "nodev", "noatime", "default_permissions", f"subtype={SUBTYPE}"]
    return [*fixed, f"fsname={source}", *(["allow_other"] if allow_other else [])]


class SessionUnsupported(Exception):
    """This session cannot run here, but another one may."""


class SwitchUnsupported(Exception):
    """This mount can never switch to another version."""


class Session(Protocol):
    """The interface; the same tests run over every implementation."""

    name: ClassVar[str]
    worker: WorkerSide
    """The session's side of the prefetch worker."""
    negotiated: str
    """What session and kernel agreed upon, for the log."""

    def __init__(self, vfs: Vfs, mountpoint: str, options: Sequence[str]) -> None: ...

    def mount(self) -> None:
        """Requests wait until `serve`. Raises DieselError; SessionUnsupported, with nothing
        mounted, if another session may work."""
        ...

    async def serve(self, started: Callable[[], None]) -> None:
        """Answers requests until the kernel has closed the connection. Calls `started` at the
        kernel's first request. If cancelled, answers the requests that still wait with EIO."""
        ...

    def clone(self) -> int:
        """Another descriptor of the connection, for notifications to the kernel. The caller closes
        it. Raises OSError."""
        ...

    def close(self) -> None:
        """The kernel fails the calls that still wait for a reply."""
        ...


class RequestWait:
    """Waits for the kernel's next request, mostly without a turn of trio's loop and without
    sleeping.

    While requests keep coming, a short poll(2) in trio's own thread waits for them. Any other task
    runs at most `slice_s` + `SPIN_S` + `poll_s` after it is ready.
    """

    def __init__(
        self, idle: Callable[[], bool], *, slice_s: float = SLICE_S, poll_s: float = POLL_S
    ) -> None:
        """`idle` returns whether the session waits only for requests; otherwise nothing waits in
        poll(2)."""
        self._idle = idle
        self._slice_s = slice_s
        self._poll_ms = poll_s * 1000
        self._slice_end_s = 0.0
        self._poll = select.poll()
        self._descriptor = -1

    async def readable(self, descriptor: int) -> None:
        """Returns when there is a request, or the connection has ended."""
        if descriptor != self._descriptor:
            self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        if time.monotonic() < self._slice_end_s and self._soon_readable():
            return
        await trio.lowlevel.wait_readable(descriptor)
        self._slice_end_s = time.monotonic() + self._slice_s

    def _soon_readable(self) -> bool:
        """Whether there is a request, now or after a short wait that delays no other task.

        The program that the last reply has woken may wait for this processor: `sched_yield` lets it
        make its next request before this thread sleeps.
        """
        if self._poll.poll(0):
            return True
        if not self._idle():
            return False
        spin_end_s = time.monotonic() + SPIN_S
        while time.monotonic() < spin_end_s:
            os.sched_yield()
            if self._poll.poll(0):
                return True
        return bool(self._poll.poll(self._poll_ms))

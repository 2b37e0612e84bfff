"""The mount's own process: opens the dataset, serves it until it is unmounted, and goes.

Owned here: the process's life (start, report, signals, end). Not owned: starting it
(`launcher.py`), where the content comes from (`source.py`), answering the kernel (the sessions).

SIGTERM and SIGINT unmount, lazily where somebody holds the mount, let reads under way finish for
`GRACE_S`, and end; a second one ends at once. In the foreground SIGHUP does the same, in the
background it is ignored. Concurrency: trio, in the main thread; the process never touches its own
mount, and unmounts from another thread while it goes on answering.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import trio

from ..errors import DieselError
from ..vfs import HiddenFile, Owner, Vfs
from . import kernel
from .holders import make_mark
from .log_limit import LogLimit
from .mountpoint import mounted_at, unmount
from .pyfuse3_session import Pyfuse3Session
from .request import MountRequest
from .session import MountOptions, Session
from .source import Source, open_source

log = logging.getLogger("diesel.mount")

GRACE_S = 1.5
"""How long reads under way may take after a signal: the process ends within 2 s (FAULTS H4)."""

FOREGROUND = "--foreground"

SESSIONS: dict[str, type[Session]] = {Pyfuse3Session.name: Pyfuse3Session}
"""By name, the best first: `auto` takes the first."""


Opener = Callable[[MountRequest], Source]
Report = Callable[[dict[str, object]], None]


def main(arguments: Sequence[str], opener: Opener = open_source) -> int:
    """Runs a daemon: `[--foreground] MOUNTPOINT`, the request on stdin. The exit code.

    In the background it reports on stdout, one JSON object a line: first its process number, then
    what it warns of, and that it is ready or what went wrong. The mount point is an argument only
    to be seen in `ps`.
    """
    lines = logging.StreamHandler(sys.stderr)
    lines.addFilter(LogLimit())
    logging.basicConfig(
        handlers=[lines], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    foreground = FOREGROUND in arguments
    report = _no_report if foreground else _report_on_stdout
    report({"pid": os.getpid()})
    try:
        request = MountRequest.from_json(sys.stdin.buffer.read())
        source = opener(request)
        if source.warning:
            log.warning("%s", source.warning)
            report({"warning": source.warning})
        _Daemon(request, source, foreground, report).run()
    except DieselError as error:
        if foreground:  # else it is told to whoever started us, with the end of the log
            log.error("%s", error)
        report(_described(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.exception("the mount failed")
        report(_described(DieselError(f"the mount failed: {error!r}")))
        return DieselError.exit_code
    return 0


def _no_report(_: dict[str, object]) -> None: ...


def _report_on_stdout(what: dict[str, object]) -> None:
    with suppress(OSError):  # whoever started us may be gone
        os.write(1, json.dumps(what).encode() + b"\n")


def _described(error: DieselError) -> dict[str, object]:
    return {"error": type(error).__name__, "message": error.message, "advice": error.advice}


class _Daemon:
    """One mount, from `run` to its end."""

    def __init__(
        self, request: MountRequest, source: Source, foreground: bool, report: Report
    ) -> None:
        snapshot = source.snapshot
        name = next(iter(SESSIONS)) if request.session == "auto" else request.session
        if name not in SESSIONS:
            raise DieselError(f"no session {name!r}", advice=f"known: auto, {', '.join(SESSIONS)}")
        about = {"session": name, "pid": os.getpid(), "mountpoint": request.mountpoint}
        uid, gid = request.owner_ids
        self._vfs = Vfs(
            snapshot,
            source.reader,
            Owner(uid, gid, request.umask),
            about=about,
            hidden={b"snapshot": HiddenFile(lambda: snapshot.buffer)},
            read_deadline_s=request.read_deadline_s,
        )
        options = MountOptions(snapshot.dataset, snapshot.version, request.allow_other)
        self._session = SESSIONS[name](self._vfs, request.mountpoint, options)
        self._mountpoint = request.mountpoint
        self._foreground = foreground
        self._report = report
        self._device = ""
        self._started = trio.Event()

    def run(self) -> None:
        """Mounts, serves, and returns when the mount is gone."""
        ending = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if self._foreground else [])]
        if not self._foreground:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        trio.run(self._run, ending)
        log.info("the mount on %s has ended", self._mountpoint)

    async def _run(self, ending: Sequence[signal.Signals]) -> None:
        with trio.open_signal_receiver(*ending) as signals:  # none may come before this
            self._session.mount()
            found = mounted_at(self._mountpoint)
            self._device = found.device if found else ""
            mark = make_mark(self._device)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._obey, signals, nursery.cancel_scope)
                    nursery.start_soon(self._announce)
                    await self._session.serve(self._started.set)
                    nursery.cancel_scope.cancel()
            finally:
                with suppress(DieselError):
                    self._unmount(lazy=True)  # nothing is left, unless the session has failed
                self._close()
                os.close(mark)

    async def _announce(self) -> None:
        """Settings come after the kernel's first exchange, which would set them back."""
        await self._started.wait()
        kernel.tune(self._device)
        log.info(
            "%s at version %d is mounted on %s (%s, device %s)",
            self._vfs.snapshot.dataset,
            self._vfs.snapshot.version,
            self._mountpoint,
            self._session.name,
            self._device,
        )
        self._report({"ready": True})
        if not self._foreground:
            os.dup2(2, 1)  # whoever started us sees the end of the report

    async def _obey(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        number = await anext(signals)
        log.info("%s: unmounting %s", signal.Signals(number).name, self._mountpoint)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave, scope)
            number = await anext(signals)
            log.warning("%s again: ending at once", signal.Signals(number).name)
            with suppress(DieselError):
                self._unmount(lazy=True)
            scope.cancel()

    async def _leave(self, scope: trio.CancelScope) -> None:
        """Unmounts, or detaches where somebody holds the mount, and ends the session."""
        with trio.move_on_after(GRACE_S):
            try:
                await trio.to_thread.run_sync(self._unmount, abandon_on_cancel=True)
            except DieselError as error:
                log.warning("%s: detaching it", error)
                with suppress(DieselError):
                    await trio.to_thread.run_sync(self._unmount, True, abandon_on_cancel=True)
            await self._vfs.settle()
        scope.cancel()

    def _unmount(self, lazy: bool = False) -> None:
        """Takes our mount away; what others have mounted there since is not touched."""
        found = mounted_at(self._mountpoint)
        if found is not None and found.device == self._device:
            unmount(self._mountpoint, lazy=lazy)

    def _close(self) -> None:
        self._session.close()
        closing = threading.Thread(target=self._vfs.close, daemon=True)
        closing.start()
        closing.join(0.3)  # a reader that waits for a dead store must not keep us


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # threads that still wait for a store are left behind

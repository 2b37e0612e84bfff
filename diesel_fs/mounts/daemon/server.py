"""The server process of a mount: it opens the dataset, mounts it, answers the kernel, unmounts.

The control socket listens before the mount is made, so that the hidden folder `.diesel` can name
it. After the kernel's first request the server waits a moment for its lease and for the worker's
first message, reports READY, and sends the worker its descriptors.

Concurrency. The main thread runs trio, and all state of this module belongs to it. One trio task of
the session answers requests that need not wait; every other request gets a task of its own.

- Between two waits a task runs alone. So a request that is answered at once sees one version, and
  `_on_switch` changes snapshot, lists and control socket in one step. During a wait the mount may
  switch to another version.
- Threads do everything that blocks. They return results and change no state of this module.
- The main thread never waits for its own mount, since nobody else could answer. Calls that may need
  an answer of this process (mounting and unmounting a tree, dropping its pages) run in threads. The
  main thread itself unmounts lazily, and only when serving has ended or is to end at once.
- Messages to the worker are queued, and lost if it does not read: it may wait for a page that only
  this process can fill. A task that waits for its answer has a deadline, or ends with the worker.

The session returns when the mount is gone; then all tasks are cancelled, and the process exits
without waiting for threads that a dead store holds.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import trio

from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...net.messages import Message, error_message
from ...orders.shuffle import GROUP_SIZE_DEFAULT
from ...repository.private_copies import snapshot_descriptor
from ...settings import runtime_folder
from ...system import syscalls
from ..options import MountRequest
from ..plans.control_socket import ControlSocket
from ..plans.list_plans import ListPlans
from ..prefetch.link import WorkerLink
from ..sessions.native import NativeSession
from ..sessions.push_status import PushStatusMap, push_status_file, share_logs
from ..sessions.session import Session
from ..source import MemorySplit, MountSource
from ..statistics.metrics_port import MetricsSource
from ..statistics.mount_metrics import metrics_text
from ..statistics.reader_groups import ReaderProcesses
from ..statistics.waits import Waits
from ..tree.dot_diesel import HiddenFile
from ..tree.vfs import MountHooks
from ..versions.leases import VersionLeases
from ..versions.watcher import VersionWatcher
from .ending import ORPHANED_SIGNAL, UNMOUNT_SIGNAL, MountEnd
from .session_choice import ServedMount, SessionChoice

log = logging.getLogger("diesel.mount")

LEASE_DEADLINE_S = 2.0
"""How long a mount waits for its lease before it is ready. The lease keeps a purge from removing
the version's chunks; a purge also has a period of grace."""

WORKER_HELLO_DEADLINE_S = 2.0
"""How long a mount waits for the worker's first message before it is ready."""

BEAT_S = 1.0
"""The interval of heartbeats to the supervisor."""

TASK_STATS_S = 1.0
"""The greatest age of the task's statistics in `.diesel/stats`."""

RELEASE_S = 0.3
"""How long the process waits at its end for its readers: a read may wait for a dead store."""

READY = b"ready"
"""The line to the supervisor when the mount is ready."""

CONNECTED = b"connected "
"""Begins the line with the device number of a connection that has no mount yet."""

Report = Callable[[Mapping[str, object]], None]
"""Reports a JSON object (a step, a warning, an error) to the program that started the mount."""


def serve_mount(
    request: MountRequest,
    source: MountSource,
    report: Report,
    supervisor_pipe: int,
    link: socket.socket,
    metrics: MetricsSource | None,
    *,
    foreground: bool,
    grace_s: float,
) -> int:
    """Runs the server process, until the mount's end. Returns the exit code.

    `supervisor_pipe` gets lines: perhaps `CONNECTED` and a device number; the mount's device
    number; `READY`; and an empty line every `BEAT_S`. `link` is the socket to the prefetch worker.
    Reads under way at the end get `grace_s` seconds to finish.
    """
    try:
        server = _Server(
            request, source, report, supervisor_pipe, WorkerLink(link), metrics, foreground, grace_s
        )
        server.run()
    except DieselError as error:
        log.error("%s", error)
        report(error_message(error))
        return error.exit_code
    except Exception as error:
        log.exception("the mount failed (a bug)")
        report(error_message(DieselError(f"the mount failed: {error!r}")))
        return DieselError.exit_code
    return 0


class _ReportHandler(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report({"warning": record.getMessage()})


@contextmanager
def _task_warnings_reported(report: Report) -> Iterator[None]:
    """Warnings of the task's cache become warnings of the mount."""
    handler, task = _ReportHandler(report), logging.getLogger("diesel.task")
    task.addHandler(handler)
    try:
        yield
    finally:
        task.removeHandler(handler)


class _Server:
    _mount: ServedMount
    _end: MountEnd

    def __init__(
        self,
        request: MountRequest,
        source: MountSource,
        report: Report,
        supervisor_pipe: int,
        link: WorkerLink,
        metrics: MetricsSource | None,
        foreground: bool,
        grace_s: float,
    ) -> None:
        self._request = request
        self._source = source
        self._report = report
        self._supervisor_pipe = supervisor_pipe
        self._link = link
        self._metrics = metrics
        self._foreground = foreground
        self._grace_s = grace_s
        self._session_notes: Sequence[str] = ()
        self._started = trio.Event()
        self._worker_begun = trio.Event()  # the worker has begun, or there will be none
        os.set_blocking(supervisor_pipe, False)
        report({"step": f"opening the dataset {request.dataset}"})
        opened = source.open(request)
        if opened.warning:
            log.warning("%s", opened.warning)
            report({"warning": opened.warning})
        self._snapshot = opened.snapshot
        self._warnings = {opened.snapshot.version: opened.warning} if opened.warning else {}
        self._memory = MemorySplit.of(request)  # once: it may depend on the free memory
        self._lists = ListPlans(
            request.seed, request.group_size or GROUP_SIZE_DEFAULT, self._snapshot.version
        )
        self._control: ControlSocket | None = None
        self._leases = VersionLeases(request, source)
        self._leased = trio.Event()
        self._task_stats: dict[str, object] = {}
        readers = ReaderProcesses(os.getppid())  # the supervisor's
        self._waits = Waits(readers.group_of)
        readers.on_found = self._waits.regroup

    # the life of the mount ------------------------------------------------------------------------

    def run(self) -> None:
        """Raises DieselError."""
        trio.run(self._run)
        log.info("the mount on %s has ended", self._request.mountpoint)

    async def _run(self) -> None:
        numbers = (signal.SIGTERM, UNMOUNT_SIGNAL, ORPHANED_SIGNAL)
        with trio.open_signal_receiver(*numbers) as signals:
            self._control = self._control_socket()
            try:
                await self._mount_and_serve(signals)
            finally:
                if self._control is not None:
                    self._control.close()

    async def _mount_and_serve(self, signals: AsyncIterator[int]) -> None:
        with _task_warnings_reported(self._report):
            self._mount = mount = self._choose_session()
        self._session_notes = mount.notes
        if mount.watcher is not None:
            mount.watcher.attach(mount.switching(self._request, self._link))
        end = self._end = MountEnd(
            self._request.mountpoint, mount.session, mount.vfs, self._grace_s
        )
        os.write(self._supervisor_pipe, f"{end.device}\n".encode())
        try:
            async with trio.open_nursery() as nursery:
                scope = nursery.cancel_scope
                nursery.start_soon(end.handle_signals, signals, scope, self._release_mount)
                nursery.start_soon(self._become_ready)
                nursery.start_soon(self._send_heartbeats)
                nursery.start_soon(self._lease_and_follow)
                if self._request.task_options:
                    nursery.start_soon(self._poll_task_stats)
                if self._metrics is not None:
                    nursery.start_soon(self._metrics.serve, lambda: metrics_text(mount.vfs.stats()))
                if self._control is not None:
                    nursery.start_soon(self._control.run)
                await mount.session.serve(self._started.set)
                scope.cancel()
            end.unmount_rest()
        except BaseException:
            end.unmount_now()
            raise
        finally:
            self._close()

    def _choose_session(self) -> ServedMount:
        # The choice gets no local name: that would keep the first version in memory after a switch
        return SessionChoice(
            self._request,
            self._snapshot,
            self._source,
            self._memory,
            hooks=self._hooks,
            watch=self._watcher,
            report_step=lambda step: self._report({"step": step}),
            on_connection=self._report_connection,
        ).mount()

    def _report_connection(self, device: str) -> None:
        """A native session uses its connection while it mounts. If the server is killed then, the
        connection can end only when the supervisor aborts it."""
        os.write(self._supervisor_pipe, CONNECTED + device.encode() + b"\n")

    async def _become_ready(self) -> None:
        session = self._mount.session
        self._report({"step": f"waiting for the kernel's first request ({session.name})"})
        await self._started.wait()
        with trio.move_on_after(LEASE_DEADLINE_S):
            await self._leased.wait()
        if not isinstance(session, NativeSession):  # which has tuned its connection itself
            syscalls.tune(self._end.device)  # not sooner: the kernel's first request resets it
        log.info(
            "%s at version %d is mounted on %s (%s session, %s, device %s)",
            self._snapshot.dataset,
            self._snapshot.version,
            self._request.mountpoint,
            session.name,
            session.negotiated,
            self._end.device,
        )
        if self._metrics is not None:
            log.info("metrics at %s", self._metrics.url)
        await self._link.receive_hello(WORKER_HELLO_DEADLINE_S)
        self._end.is_ready = True
        with suppress(BrokenPipeError):  # the supervisor was killed: ORPHANED_SIGNAL comes
            os.write(self._supervisor_pipe, READY + b"\n")
        if not self._foreground:
            os.dup2(2, 1)  # ends the report on stdout, for which the starter waits
        has_worker = self._start_worker(session)
        self._worker_begun.set()
        if has_worker:
            await self._link.run()
            session.worker.detach()
        else:
            self._link.close()

    def _start_worker(self, session: Session) -> bool:
        """Returns False if descriptors could not be had: then nothing is pushed."""
        begin: Message = {
            "do": "begin",
            "device": self._end.device,
            "push_bytes": self._memory.push_bytes,
        }
        with ExitStack() as stack:
            try:
                stack.callback(os.close, device := session.clone())
                stack.callback(os.close, snapshot := snapshot_descriptor(self._snapshot))
                stack.callback(os.close, shared := push_status_file(self._snapshot.entry_count))
                descriptors = [device, snapshot, shared]
                if isinstance(session, NativeSession):
                    begin["content_node"] = session.content_node
                    descriptors += [self._mount.image_file, session.private_mount]
                share_logs(self._mount.reader, shared)  # order logs
                self._link.start_worker(begin, descriptors)
                if self._mount.watcher is not None:
                    self._mount.watcher.attach_worker(shared)
                else:
                    push_status = PushStatusMap(shared)
                    session.worker.attach(
                        self._link.report_miss, self._link.report_forgotten, push_status
                    )
            except OSError as error:
                log.error("nothing is pushed into the kernel's page cache: %s", error)
                return False
        self._lists.connect_worker(self._link)
        if self._control is not None:
            self._control.has_worker = True
        return True

    async def _send_heartbeats(self) -> None:
        while True:
            # If the supervisor was killed, an error here would unmount, and readers would find an
            # empty folder instead of errors
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._supervisor_pipe, b"\n")
            await trio.sleep(BEAT_S)

    def _release_mount(self) -> None:
        """Stops everything that keeps the mount busy, or would send something to the kernel."""
        if self._mount.watcher is not None:
            self._mount.watcher.stop()
        self._link.send({"do": "end"})  # the worker keeps the mount busy, too

    def _close(self) -> None:
        self._mount.session.close()
        closing = threading.Thread(target=self._close_readers, daemon=True)
        closing.start()
        closing.join(RELEASE_S)

    def _close_readers(self) -> None:
        self._mount.vfs.close()
        self._leases.close()

    # versions -------------------------------------------------------------------------------------

    def _watcher(self, memory_bytes: int, retired_bytes: int) -> VersionWatcher:
        return VersionWatcher(
            self._request, self._source, self._link, self._leases, memory_bytes, retired_bytes,
            self._on_switch,
        )  # fmt: skip

    def _on_switch(self, snapshot: Snapshot) -> None:
        """Called once look-ups find the version of `snapshot`."""
        self._snapshot = snapshot
        self._lists.switch_version(snapshot.version)
        if self._control is not None:
            self._control.set_hello(self._hello())

    async def _lease_and_follow(self) -> None:
        await trio.to_thread.run_sync(
            self._leases.set_versions, [self._snapshot], abandon_on_cancel=True
        )
        self._leased.set()
        if self._mount.watcher is not None:
            await self._worker_begun.wait()
            await self._mount.watcher.run()

    # `.diesel` ------------------------------------------------------------------------------------

    def _hooks(self, session: str) -> MountHooks:
        mount_info = {
            "session": session,
            "pid": os.getppid(),
            "server_pid": os.getpid(),
            "mountpoint": self._request.mountpoint,
        }
        return MountHooks(
            mount_info=mount_info,
            files={b"snapshot": HiddenFile(lambda: self._snapshot.buffer)},
            list_observer=self._lists,
            control_path=lambda: b"" if self._control is None else self._control.path,
            prefetch_stats=lambda: dict(self._link.worker_stats),
            extra_stats=self._extra_stats,
            waits=self._waits,
        )

    def _extra_stats(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._metrics is not None:
            extra["metrics"] = self._metrics.url
        if self._session_notes:  # a native mount answers before `_mount` is set
            extra["session_notes"] = self._session_notes
        if warning := self._warnings.get(self._snapshot.version):
            extra["warning"] = warning
        if self._request.task_options:
            extra["task"] = {"name": self._request.task_options.task, **self._task_stats}
        return extra

    async def _poll_task_stats(self) -> None:
        while True:
            self._task_stats = await trio.to_thread.run_sync(
                self._source.task_stats, abandon_on_cancel=True
            )
            await trio.sleep(TASK_STATS_S)

    # the control socket ---------------------------------------------------------------------------

    def _control_socket(self) -> ControlSocket | None:
        """A socket that listens; None if it cannot be made: then the mount takes no plans."""
        try:
            made = ControlSocket(
                runtime_folder(),
                self._hello(),
                self._stats,
                self._link,
                any_user=self._request.allow_other,
            )
            made.listen()
        except DieselError as error:
            log.warning("the mount takes no plans: %s", error)
            return None
        return made

    def _hello(self) -> Message:
        return {
            "dataset": self._snapshot.dataset,
            "identity": str(self._snapshot.identity),
            "version": self._snapshot.version,
            "entries": self._snapshot.entry_count,
        }

    def _stats(self) -> Message:
        return self._mount.vfs.stats()  # type: ignore[return-value]  # JSON's values are msgpack's

"""The server process of a mount: it opens the dataset, mounts it, answers the kernel, unmounts.

The supervisor (`supervisor.py`) forks it. This module is the process's life: start, choice of the
session, report to the starter, signals, end. The contents come from `source.py`, and a session
answers the kernel.

`UNMOUNT_SIGNAL` unmounts (lazily where the mount is in use), lets reads under way finish for
`GRACE_S`, and ends the process; a second one ends it at once.

Concurrency: trio, in the main thread. The process never touches its own mount, and unmounts in
another thread while it goes on answering.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import trio

from ...errors import DieselError, FormatError, PermissionDenied, UsageError
from ...format.image import ImageTooLarge, Shown
from ...format.snapshot.reader import Snapshot
from ...net.messages import Message, error_message
from ...orders.shuffle import GROUP_SIZE_DEFAULT
from ...repository.private_copies import snapshot_descriptor
from ...settings import runtime_folder
from ...system import syscalls
from ..mountpoints.mountpoint import end_connection, mounted_at, place_of, unmount
from ..mountpoints.processes import free_killed, killed_servants_of
from ..options import MountRequest
from ..plans.control_socket import ControlSocket
from ..plans.list_plans import ListPlans
from ..prefetch.link import WorkerLink
from ..sessions.kernel import KernelSession
from ..sessions.native import NativeSession, TreeVersion
from ..sessions.push_status import PushStatusMap, push_status_file, share_logs
from ..sessions.session import Session, SessionUnsupported, mount_options
from ..source import MemorySplit, MountSource
from ..statistics.metrics_port import MetricsSource
from ..statistics.mount_metrics import metrics_text
from ..statistics.reader_groups import ReaderProcesses
from ..statistics.waits import Waits
from ..tree.attributes import Owner
from ..tree.dot_diesel import HiddenFile
from ..tree.images import open_image
from ..tree.vfs import MountHooks, Vfs
from ..versions.following import FollowingVfs
from ..versions.fuse_switch import FuseSwitching
from ..versions.leases import VersionLeases
from ..versions.native_switch import NativeSwitching, tree_version
from ..versions.switching import Switching
from ..versions.versioned_vfs import VersionedVfs
from ..versions.watcher import VersionWatcher

log = logging.getLogger("diesel.mount")

GRACE_S = 1.5
"""How long reads under way may take after a signal: the process ends within 2 s."""

NEXT_READ_S = 0.02
"""How soon after a READ the next one of the same read comes at the latest, in a native mount."""

LEASE_DEADLINE_S = 2.0
"""How long a mount waits for its lease before it is ready. The lease keeps a purge from removing
the version's chunks; a purge also has a period of grace."""

WORKER_HELLO_DEADLINE_S = 2.0
"""How long a mount waits for the worker's first message before it is ready."""

BEAT_S = 1.0
"""How often the supervisor gets a heartbeat."""

UNMOUNT_SIGNAL = signal.SIGUSR1
"""What the supervisor sends: once to unmount, twice to end at once. SIGTERM from other processes
unmounts as well, but does not count: they may have signalled the supervisor too."""

ORPHANED_SIGNAL = signal.SIGUSR2
"""What the kernel sends when the supervisor was killed. The server then aborts the connection,
since the worker may wait for a page lock. Before there is a mount this signal ends the process."""

RETIRED_DIVISOR = 4
"""In a mount that follows, this part of the server's memory is for all retired versions."""

TASK_STATS_S = 1.0
"""How old the statistics of the task in `.diesel/stats` may be."""

READY = b"ready"

CONNECTED = b"connected "
"""Before the device of a connection that has no mount yet."""

SESSIONS = (NativeSession.name, KernelSession.name, "pyfuse3")
"""The best first: `--session auto` takes the first of them that works here."""

Report = Callable[[Mapping[str, object]], None]


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
    """Runs the server process, from opening the dataset to the mount's end. Returns the exit code.

    `report` reaches the program that started the mount. `supervisor_pipe` gets lines for the
    supervisor: perhaps `CONNECTED` and a device; the mount's device; `READY`; and then an empty
    line every `BEAT_S`. `link` is the
    socket to the prefetch worker. `metrics` asks for the metrics, with `--metrics`. Reads under way
    at the end get `grace_s`.
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


def _pyfuse3_session() -> type[Session]:
    """The class of the session. Raises SessionUnsupported where its package is not installed."""
    try:
        from ..sessions.pyfuse3 import Pyfuse3Session  # noqa: PLC0415  # it has to be compiled
    except ImportError as error:
        raise SessionUnsupported(
            f"it needs the package pyfuse3 ({error}), which pip compiles: `apt-get install gcc"
            " libfuse3-dev pkg-config python3-dev`, then `pip install"
            " 'diesel_fs-VERSION-py3-none-any.whl[pyfuse3]'`"
        ) from error
    return Pyfuse3Session


class _ReportHandler(logging.Handler):
    """Reports warnings to the program that started the mount."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report({"warning": record.getMessage()})


class _Server:
    """One mount, from `run` to its end."""

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
        self._device = ""
        self._mount_id = 0  # where the mount does not switch to other trees
        self._abort_file = -1
        self._session_notes: Sequence[str] = ()
        self._is_ready = False
        self._started = trio.Event()
        self._worker_begun = trio.Event()  # or there will be none
        os.set_blocking(supervisor_pipe, False)
        report({"step": f"opening the dataset {request.dataset}"})
        opened = source.open(request)
        if opened.warning:
            log.warning("%s", opened.warning)
            report({"warning": opened.warning})
        self._snapshot = opened.snapshot
        self._warnings = {opened.snapshot.version: opened.warning} if opened.warning else {}
        self._memory = MemorySplit.of(request)
        self._lists = ListPlans(
            request.seed, request.group_size or GROUP_SIZE_DEFAULT, self._snapshot.version
        )
        self._control: ControlSocket | None = None
        self._watcher: VersionWatcher | None = None
        self._leases = VersionLeases(request, source)
        self._leased = trio.Event()
        self._task_stats: dict[str, object] = {}
        readers = ReaderProcesses(os.getppid())
        self._waits = Waits(readers.group_of)
        readers.on_found = self._waits.regroup

    def run(self) -> None:
        """Mounts, serves, and returns when the mount has ended. Raises DieselError."""
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
        with self._task_warnings_reported():
            self._session = self._mount()
        if self._watcher is not None:
            self._watcher.attach(self._make_switching())
        found = mounted_at(self._request.mountpoint)
        self._device = found.device if found else ""
        self._mount_id = found.tree.mount_id if found else 0
        self._abort_file = syscalls.open_abort(self._device)
        os.write(self._supervisor_pipe, f"{self._device}\n".encode())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_signals, signals, nursery.cancel_scope)
                nursery.start_soon(self._become_ready)
                nursery.start_soon(self._send_heartbeats)
                nursery.start_soon(self._lease_and_follow)
                if self._request.task_options:
                    nursery.start_soon(self._poll_task_stats)
                if self._metrics is not None:
                    nursery.start_soon(self._metrics.serve, lambda: metrics_text(self._vfs.stats()))
                if self._control is not None:
                    nursery.start_soon(self._control.run)
                await self._session.serve(self._started.set)
                nursery.cancel_scope.cancel()
            # A FUSE mount that ends by itself is mounted nowhere any more; its folder and the
            # number of its device may already belong to another mount.
            if isinstance(self._session, NativeSession) and self._session.has_trees:
                self._unmount_now()
        except BaseException:
            self._unmount_now()
            raise
        finally:
            self._close()

    @contextmanager
    def _task_warnings_reported(self) -> Iterator[None]:
        """Warnings of the task's cache are reported as warnings of the mount meanwhile."""
        handler, task = _ReportHandler(self._report), logging.getLogger("diesel.task")
        task.addHandler(handler)
        try:
            yield
        finally:
            task.removeHandler(handler)

    def _mount(self) -> Session:
        """Mounts by the first session that works here. Raises DieselError."""
        wanted = self._request.session
        if wanted != "auto" and wanted not in SESSIONS:
            raise UsageError(
                f"there is no session {wanted!r}", advice=f"known: auto, {', '.join(SESSIONS)}"
            )
        reasons: list[str] = []
        for name in SESSIONS if wanted == "auto" else [wanted]:
            self._report({"step": f"trying the {name} session"})
            with ExitStack() as stack:
                try:
                    if name == NativeSession.name:
                        must_switch = self._request.follow and wanted == "auto"
                        NativeSession.check_usable(must_switch=must_switch)
                    self._vfs = self._make_vfs(name)
                    stack.callback(self._vfs.close)
                    session = self._make_session(name)
                    session.mount()
                except SessionUnsupported as error:
                    reasons.append(f"the {name} session cannot be used: {error}")
                    if wanted == "auto":
                        # Most users may not have the native session, and need not be told.
                        level = logging.INFO if name == NativeSession.name else logging.WARNING
                        log.log(level, "%s", reasons[-1])
                    continue
                stack.pop_all()
            self._note_session(session, reasons)
            return session
        advice = "" if wanted == "auto" else "--session auto takes the best session that works here"
        raise PermissionDenied("; ".join(reasons), advice=advice)

    def _note_session(self, session: Session, reasons: Sequence[str]) -> None:
        """Keeps for the statistics why there is not a better session, if there is none."""
        notes = [*reasons]
        if isinstance(session, NativeSession) and session.note:
            log.info("%s", session.note)
            notes.append(session.note)
        self._session_notes = notes

    def _make_session(self, name: str) -> Session:
        """Raises SessionUnsupported, DieselError."""
        request, snapshot = self._request, self._snapshot
        options = mount_options(
            snapshot.dataset,
            snapshot.version,
            allow_other=request.allow_other,
            follows=request.follow,
        )
        if name == NativeSession.name:
            self._report({"step": "making the tree of the native session"})
            try:
                image, self._image_file = open_image(snapshot, self._shown)
            except (ImageTooLarge, FormatError) as error:
                raise SessionUnsupported(str(error)) from error
            self._report({"step": "mounting the tree of the native session"})
            vfs = self._vfs
            if isinstance(vfs, VersionedVfs):
                shown = tree_version(vfs, vfs.current, image, self._image_file)
            else:
                shown = TreeVersion(image, self._image_file, vfs)
            return NativeSession(
                vfs, request.mountpoint, options, shown, on_connection=self._report_connection
            )
        session = KernelSession if name == KernelSession.name else _pyfuse3_session()
        return session(self._vfs, request.mountpoint, options)

    def _report_connection(self, device: str) -> None:
        """A native session uses its connection itself while it mounts. If the server is killed at
        that, it can end only when the supervisor aborts the connection."""
        os.write(self._supervisor_pipe, CONNECTED + device.encode() + b"\n")

    @property
    def _shown(self) -> Shown:
        """What a native mount shows besides its snapshot."""
        request = self._request
        private_to = -1 if request.allow_other else os.geteuid()
        return Shown(*request.owner_ids, request.umask, private_to)

    def _make_switching(self) -> Switching:
        """How the mount that was made follows its dataset."""
        vfs, session, link = self._vfs, self._session, self._link
        if isinstance(session, NativeSession):
            assert isinstance(vfs, VersionedVfs)
            return NativeSwitching(vfs, session, link, self._shown)
        assert isinstance(vfs, FollowingVfs)
        return FuseSwitching(vfs, session, link)

    def _make_vfs(self, session: str) -> Vfs:
        snapshot, request = self._snapshot, self._request
        pushes = session != "pyfuse3"
        memory_bytes = self._memory.server_bytes(pushes=pushes)
        retired_bytes = memory_bytes // RETIRED_DIVISOR if request.follow else 0
        memory_bytes -= retired_bytes
        reader = self._source.reader(request, snapshot, memory_bytes, pushes=pushes)
        self._reader = reader
        owner = Owner(*request.owner_ids, request.umask)
        mount_info = {
            "session": session,
            "pid": os.getppid(),
            "server_pid": os.getpid(),
            "mountpoint": request.mountpoint,
        }
        hooks = MountHooks(
            mount_info=mount_info,
            files={b"snapshot": HiddenFile(lambda: self._snapshot.buffer)},
            list_observer=self._lists,
            control_path=self._control_path,
            prefetch_stats=self._prefetch_stats,
            extra_stats=self._extra_stats,
            waits=self._waits,
        )
        deadline_s = request.read_deadline_s
        if not request.follow:
            return Vfs(snapshot, reader, owner, hooks, read_deadline_s=deadline_s)
        self._watcher = VersionWatcher(
            request, self._source, self._link, self._leases, memory_bytes, retired_bytes,
            self._on_switch,
        )  # fmt: skip
        kind = VersionedVfs if session == NativeSession.name else FollowingVfs
        return kind(
            snapshot,
            reader,
            owner,
            hooks,
            follow_stats=self._watcher.stats,
            read_deadline_s=deadline_s,
        )

    def _control_path(self) -> bytes:
        return b"" if self._control is None else self._control.path

    def _prefetch_stats(self) -> Message:
        return dict(self._link.worker_stats)

    def _extra_stats(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._metrics is not None:
            extra["metrics"] = self._metrics.url
        if self._session_notes:
            extra["session_notes"] = self._session_notes
        if warning := self._warnings.get(self._snapshot.version):
            extra["warning"] = warning
        if self._request.task_options:
            extra["task"] = {"name": self._request.task_options.task, **self._task_stats}
        return extra

    async def _poll_task_stats(self) -> None:
        """Fetches the task's statistics for `.diesel/stats`, which may wait for its master."""
        while True:
            self._task_stats = await trio.to_thread.run_sync(
                self._source.task_stats, abandon_on_cancel=True
            )
            await trio.sleep(TASK_STATS_S)

    def _on_switch(self, snapshot: Snapshot) -> None:
        """Switches lists and control socket when names have begun to lead to another version."""
        self._snapshot = snapshot
        self._lists.switch_version(snapshot.version)
        if self._control is not None:
            self._control.set_hello(self._hello())

    async def _lease_and_follow(self) -> None:
        """Takes the lease on the version; then follows the dataset, with `--follow`."""
        await trio.to_thread.run_sync(
            self._leases.set_versions, [self._snapshot], abandon_on_cancel=True
        )
        self._leased.set()
        if self._watcher is not None:
            await self._worker_begun.wait()
            await self._watcher.run()

    def _control_socket(self) -> ControlSocket | None:
        """The socket that takes plans; None where it cannot be made, and the mount goes on."""
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
        return self._vfs.stats()  # type: ignore[return-value]  # what JSON takes, msgpack takes

    async def _become_ready(self) -> None:
        """Reports that the mount is ready, starts the worker, and runs the link to it."""
        self._report({"step": f"waiting for the kernel's first request ({self._session.name})"})
        await self._started.wait()
        with trio.move_on_after(LEASE_DEADLINE_S):
            await self._leased.wait()
        if not isinstance(self._session, NativeSession):  # which has done so itself
            syscalls.tune(self._device)  # the kernel's first request would have reset this
        log.info(
            "%s at version %d is mounted on %s (%s session, %s, device %s)",
            self._snapshot.dataset,
            self._snapshot.version,
            self._request.mountpoint,
            self._session.name,
            self._session.negotiated,
            self._device,
        )
        if self._metrics is not None:
            log.info("metrics at %s", self._metrics.url)
        if isinstance(self._session, KernelSession):
            await self._link.receive_hello(WORKER_HELLO_DEADLINE_S)
        self._is_ready = True
        with suppress(BrokenPipeError):  # the supervisor was killed; a signal says so
            os.write(self._supervisor_pipe, READY + b"\n")  # the supervisor reports it
        if not self._foreground:
            os.dup2(2, 1)  # closes the report, of which the starter waits for the end
        session = self._session
        pushing = session if isinstance(session, KernelSession) else None
        if pushing is not None and not self._start_worker(pushing):
            pushing = None
        self._worker_begun.set()
        if pushing is not None:
            await self._link.run()
            pushing.detach_worker()
        else:
            self._link.close()
        self._session.set_open_callback(self._on_open)

    def _on_open(self, entry: int) -> None:
        """Tells the lists that a file was opened, whose node is `entry` + 1."""
        vfs = self._vfs
        self._lists.on_open(vfs.entry_of(entry + 1) if isinstance(vfs, FollowingVfs) else entry)

    def _start_worker(self, session: KernelSession) -> bool:
        """Sends the worker the connection, snapshot and shared memory. False if it cannot."""
        begin: Message = {
            "do": "begin",
            "device": self._device,
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
                    descriptors += [self._image_file, session.private_mount]
                share_logs(self._reader, shared)
                self._link.start_worker(begin, descriptors)
                if self._watcher is not None:
                    self._watcher.attach_worker(shared)
                else:
                    push_status = PushStatusMap(shared)
                    session.attach_worker(
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
            with suppress(BlockingIOError):
                os.write(self._supervisor_pipe, b"\n")
            await trio.sleep(BEAT_S)

    async def _handle_signals(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        first = await anext(signals)
        if first == ORPHANED_SIGNAL:
            self._abort()
            return
        log.info("unmounting %s", self._request.mountpoint)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._unmount_and_end, scope)
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

    def _abort(self) -> None:
        log.critical("the supervisor was killed: ending the mount")
        if self._abort_file >= 0:
            os.write(self._abort_file, b"1")
        else:
            self._session.close()
            for pid in killed_servants_of(self._request.mountpoint):
                free_killed(pid, self._grace_s)
        if not self._is_ready:  # who started it may have looked already whether it is mounted
            with suppress(DieselError):
                self._unmount(lazy=True)
        os._exit(1)

    async def _unmount_and_end(self, scope: trio.CancelScope) -> None:
        """Unmounts (lazily where the mount is in use), and ends the session."""
        if self._watcher is not None:
            self._watcher.stop()
        self._link.send({"do": "end"})  # the worker keeps the mount busy, too
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
        """Waits until no read is under way. For one read of a native mount the kernel sends READs
        one after the other, so it has ended when no other comes.
        """
        await self._vfs.drain()
        answered = -1
        while isinstance(self._session, NativeSession) and self._vfs.requests["read"] != answered:
            answered = self._vfs.requests["read"]
            await trio.sleep(NEXT_READ_S)
            await self._vfs.drain()

    def _unmount(self, lazy: bool = False) -> None:
        """Unmounts this mount, but nothing that was mounted on top of it since."""
        while (place := self._place()) is not None:  # twice during a switch of trees
            unmount(place, lazy=lazy)

    def _place(self) -> str | None:
        """Where the mount is now; None where it is unmounted, or lies below another mount."""
        session = self._session
        mount_id = session.mount_id if isinstance(session, NativeSession) else self._mount_id
        return place_of(mount_id, self._device, self._request.mountpoint)

    def _unmount_now(self) -> None:
        """Unmounts although nobody will answer any more. So the connection is ended first: to
        unmount the tree of a native mount would wait for READs under way.
        """
        if isinstance(self._session, NativeSession):
            place = self._place() or self._request.mountpoint
            end_connection(self._abort_file, place, self._device)
        with suppress(DieselError):
            self._unmount(lazy=True)

    def _close(self) -> None:
        self._session.close()
        closing = threading.Thread(target=self._release, daemon=True)
        closing.start()
        closing.join(0.3)  # no longer: a read may wait for a dead store

    def _release(self) -> None:
        self._vfs.close()
        self._leases.close()

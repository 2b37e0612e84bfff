"""Mounts by the best session that works here: native, otherwise kernel, otherwise pyfuse3.

Each try makes a file system of its own, because sessions need different ones, and closes it if the
session cannot be used.

Concurrency: the server's thread, before any task runs. A native session mounts in a thread, and
answers requests itself meanwhile.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...errors import FormatError, PermissionDenied, UsageError
from ...format.image import ImageTooLarge, Shown
from ...format.snapshot.reader import Snapshot
from ..options import MountRequest
from ..prefetch.link import WorkerLink
from ..sessions.kernel import KernelSession
from ..sessions.native import NativeSession, TreeVersion
from ..sessions.session import Session, SessionUnsupported, mount_options
from ..source import MemorySplit, MountSource
from ..tree.attributes import Owner
from ..tree.images import open_image
from ..tree.vfs import ContentReader, MountHooks, Vfs
from ..versions.following import FollowingVfs
from ..versions.fuse_switch import FuseSwitching
from ..versions.native_switch import NativeSwitching, tree_version
from ..versions.switching import Switching
from ..versions.versioned_vfs import VersionedVfs
from ..versions.watcher import VersionWatcher

log = logging.getLogger("diesel.mount")

SESSIONS = (NativeSession.name, KernelSession.name, "pyfuse3")
"""The best first, as `--session auto` tries them."""

RETIRED_DIVISOR = 4
"""The part of the server's memory for all retired versions of a mount that follows its dataset."""


@dataclass(frozen=True, slots=True)
class ServedMount:
    session: Session
    vfs: Vfs
    reader: ContentReader
    """The reader of the first version's contents."""
    image_file: int
    """A descriptor of the tree's image; -1 unless the mount is native."""
    watcher: VersionWatcher | None
    notes: Sequence[str]
    """Why better sessions cannot be used, and the note of a native session."""

    def switching(self, request: MountRequest, link: WorkerLink) -> Switching:
        if isinstance(self.session, NativeSession):
            assert isinstance(self.vfs, VersionedVfs)
            return NativeSwitching(self.vfs, self.session, link, _shown(request))
        assert isinstance(self.vfs, FollowingVfs)
        return FuseSwitching(self.vfs, self.session, link)


class SessionChoice:
    def __init__(
        self,
        request: MountRequest,
        snapshot: Snapshot,
        source: MountSource,
        memory: MemorySplit,
        *,
        hooks: Callable[[str], MountHooks],
        watch: Callable[[int, int], VersionWatcher],
        report_step: Callable[[str], None],
        on_connection: Callable[[str], None],
    ) -> None:
        """`hooks` gets the name of a session, `watch` the bytes of memory for the current version
        and for all retired versions, `report_step` a line about each step, and `on_connection` the
        device number of a connection that is used before there is a mount."""
        self._request = request
        self._snapshot = snapshot
        self._source = source
        self._memory = memory
        self._hooks = hooks
        self._watch = watch
        self._report_step = report_step
        self._on_connection = on_connection

    def mount(self) -> ServedMount:
        """Raises DieselError."""
        wanted = self._request.session
        if wanted != "auto" and wanted not in SESSIONS:
            raise UsageError(
                f"there is no session {wanted!r}", advice=f"known: auto, {', '.join(SESSIONS)}"
            )
        reasons: list[str] = []
        for name in SESSIONS if wanted == "auto" else [wanted]:
            self._report_step(f"trying the {name} session")
            try:
                return self._mount_by(name, reasons)
            except SessionUnsupported as error:
                reasons.append(f"the {name} session cannot be used: {error}")
                if wanted == "auto":
                    # Most users may not have the native session, and need no warning
                    level = logging.INFO if name == NativeSession.name else logging.WARNING
                    log.log(level, "%s", reasons[-1])
        advice = "" if wanted == "auto" else "--session auto takes the best session that works here"
        raise PermissionDenied("; ".join(reasons), advice=advice)

    def _mount_by(self, name: str, reasons: Sequence[str]) -> ServedMount:
        """Raises SessionUnsupported, DieselError; nothing is mounted then."""
        if name == NativeSession.name:
            must_switch = self._request.follow and self._request.session == "auto"
            NativeSession.check_usable(must_switch=must_switch)
        vfs, reader, watcher = self._make_vfs(name)
        with ExitStack() as stack:
            stack.callback(vfs.close)
            image_file = -1
            session: Session
            if name == NativeSession.name:
                session, image_file = self._make_native(vfs)
            else:
                kind = KernelSession if name == KernelSession.name else _pyfuse3_session()
                session = kind(vfs, self._request.mountpoint, self._options())
            session.mount()
            stack.pop_all()
        notes = [*reasons]
        if isinstance(session, NativeSession) and session.note:
            log.info("%s", session.note)
            notes.append(session.note)
        return ServedMount(session, vfs, reader, image_file, watcher, notes)

    def _make_vfs(self, session: str) -> tuple[Vfs, ContentReader, VersionWatcher | None]:
        request, snapshot = self._request, self._snapshot
        memory_bytes = self._memory.server_bytes
        retired_bytes = memory_bytes // RETIRED_DIVISOR if request.follow else 0
        memory_bytes -= retired_bytes
        reader = self._source.reader(request, snapshot, memory_bytes)
        owner = Owner(*request.owner_ids, request.umask)
        hooks, deadline_s = self._hooks(session), request.read_deadline_s
        if not request.follow:
            return Vfs(snapshot, reader, owner, hooks, read_deadline_s=deadline_s), reader, None
        watcher = self._watch(memory_bytes, retired_bytes)
        kind = VersionedVfs if session == NativeSession.name else FollowingVfs
        vfs = kind(
            snapshot,
            reader,
            owner,
            hooks,
            follow_stats=watcher.stats,
            read_deadline_s=deadline_s,
        )
        return vfs, reader, watcher

    def _make_native(self, vfs: Vfs) -> tuple[NativeSession, int]:
        """Also returns a descriptor of the image. Raises SessionUnsupported, DieselError."""
        self._report_step("making the tree of the native session")
        try:
            image, file = open_image(self._snapshot, _shown(self._request))
        except (ImageTooLarge, FormatError) as error:
            raise SessionUnsupported(str(error)) from error
        self._report_step("mounting the tree of the native session")
        if isinstance(vfs, VersionedVfs):
            version = tree_version(vfs, vfs.current, image, file)
        else:
            version = TreeVersion(image, file, vfs)
        session = NativeSession(
            vfs,
            self._request.mountpoint,
            self._options(),
            version,
            on_connection=self._on_connection,
        )
        return session, file

    def _options(self) -> Sequence[str]:
        return mount_options(
            self._snapshot.dataset,
            self._snapshot.version,
            allow_other=self._request.allow_other,
            follows=self._request.follow,
        )


def _shown(request: MountRequest) -> Shown:
    """The properties of a native mount's image that the snapshot does not determine."""
    private_to = -1 if request.allow_other else os.geteuid()
    return Shown(*request.owner_ids, request.umask, private_to)


def _pyfuse3_session() -> type[Session]:
    """Raises SessionUnsupported if the package is not installed."""
    try:
        from ..sessions.pyfuse3 import Pyfuse3Session  # noqa: PLC0415  # it has to be compiled
    except ImportError as error:
        raise SessionUnsupported(
            f"it needs the package pyfuse3 ({error}), which pip compiles: `apt-get install gcc"
            " libfuse3-dev pkg-config python3-dev`, then `pip install"
            " 'diesel_fs-VERSION-py3-none-any.whl[pyfuse3]'`"
        ) from error
    return Pyfuse3Session

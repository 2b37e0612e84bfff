"""Holds the puts of one process until they are flushed: the write half of a `Dataset`.

A put is checked against the newest version that this process knows and against its own earlier
puts, and packed into chunks. One thread at a time may call. A forked child inherits no puts.
"""

import io
import os
import reprlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..arguments import local_path, whole_number, wrong_type
from ..errors import ConflictError, NoSuchFile, PermissionDenied, UsageError
from ..format.chunk import CHUNK_BYTES_DEFAULT
from ..format.entries import Kind, check_path, split
from ..format.snapshot.reader import Snapshot
from ..ingest.concurrent_writers import finish_put
from ..ingest.options import PutReport
from ..ingest.packer import MTIMES_NS, FileSkipped, Packer, start_packer
from ..ingest.paths import is_reserved
from ..names import cut
from ..repository.interface import Repository
from ..repository.writing import WriteSession
from ..system.atomic_file import close_folder
from .addressing import PathText, encoded

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
"""The path of a file, bytes, or a binary file object."""

_READ_BYTES = 1 << 20
_MODE_MAX = 0o177777  # with the bits of the file's type, as `st_mode` has them
_SPOOL_BYTES = 64 << 20  # a longer stream is spooled to disk until its length is known


class PendingPuts:
    """A session on the dataset, and a packer with the contents since the last flush."""

    def __init__(self, repository: Repository, view: Snapshot, compress: str) -> None:
        self._repository = repository
        self._name = view.dataset
        self._compress = compress
        self._newest = view  # `load_meta` may go back to an older version
        self._process = os.getpid()
        self._writing: tuple[WriteSession, Packer] | None = None
        # Paths that were put and that the shown version does not have yet
        self._folders: set[bytes] = set()
        self._files: set[bytes] = set()

    def note_version(self, view: Snapshot) -> None:
        """Check later puts against `view`, if no newer version is known."""
        self._newest = max(self._newest, view, key=_version)

    def add(
        self, view: Snapshot, source: Source, path: PathText, mode: int, mtime_ns: int | None
    ) -> None:
        """`view` is the version that the dataset shows now. Raises as `Dataset.put`."""
        packer = self._begun(view)[1]
        target = self._target(path)
        mode = whole_number("mode", mode, 0, _MODE_MAX)
        now = time.time_ns()
        if mtime_ns is not None:
            now = whole_number("mtime_ns", mtime_ns, MTIMES_NS.start, MTIMES_NS.stop - 1)
        try:
            if isinstance(source, str | os.PathLike):
                self._add_file(packer, local_path("source", source), target, now)
            elif isinstance(source, bytes | bytearray | memoryview):
                content = source if isinstance(source, bytes) else bytes(source)
                self._add_parents(packer, target, now)
                packer.add_stream(io.BytesIO(content), len(content), split(target), mode, now)
            else:
                with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                    _copy(source, spool)
                    size = spool.tell()
                    spool.seek(0)
                    self._add_parents(packer, target, now)
                    packer.add_stream(spool, size, split(target), mode, now)
        except FileSkipped as reason:
            raise ConflictError(f"{cut(os.fsdecode(target))!r} is not put: {reason}") from None
        self._files.add(target)

    def delete(self, view: Snapshot, paths: Sequence[bytes]) -> None:
        """Each entry of `view` comes before its folder."""
        self._begun(view)[0].delete(paths)
        self._folders.difference_update(paths)
        self._files.difference_update(paths)

    def flush(self) -> PutReport | None:
        """Make all puts durable. Returns the conflicts with other writers, or None without puts."""
        if self._writing is None or self._process != os.getpid():
            return None
        session, packer = self._writing
        packer.finish()
        report = PutReport()
        if finish_put(self._repository, session, report):
            packer.close()
            self._writing = None  # the next put begins a session of its own
        return report

    def forget_paths(self) -> None:
        """The version that is shown next has these paths."""
        self._folders.clear()
        self._files.clear()

    def close(self) -> None:
        """Repeatable."""
        if self._writing is not None and self._process == os.getpid():
            self._writing[1].close()
        self._forget()

    def _forget(self) -> None:
        self._process, self._writing = os.getpid(), None
        self.forget_paths()

    def _begun(self, view: Snapshot) -> tuple[WriteSession, Packer]:
        """The first put after a flush begins a session and its packer."""
        if self._process != os.getpid():
            self._forget()
        if self._writing is None:
            session = self._repository.begin(self._name, create=False)
            session.use_view(view)
            _ = session.view  # loads the current version, against which conflicts are found
            self._writing = session, start_packer(session, CHUNK_BYTES_DEFAULT, self._compress)
        return self._writing

    def _add_file(self, packer: Packer, source: Path, target: bytes, now: int) -> None:
        try:
            real = Path(os.path.realpath(source, strict=True))
            folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._add_parents(packer, target, now)
                packer.add_file(folder, os.fsencode(real.name), split(target))
            finally:
                close_folder(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NoSuchFile(
                f"there is no file {cut(str(source))!r} to put",
                advice="`source` is the path of a file of this machine, or bytes: text is put by"
                " text.encode(), and `path` comes second",
            ) from error
        except OSError as error:
            raise PermissionDenied(f"cannot read {cut(str(source))!r}: {error.strerror}") from error

    def _target(self, path: PathText) -> bytes:
        """Raises UsageError, and ConflictError for a folder."""
        target = check_path(encoded(path))
        if not target or is_reserved(target):
            raise UsageError(
                f"{reprlib.repr(path)} cannot be the path of a file: it is the root or reserved"
            )
        if target in self._folders or self._kind_at(target) == Kind.FOLDER:
            raise ConflictError(
                f"{cut(os.fsdecode(target))!r} is a folder", advice="delete it first"
            )
        return target

    def _kind_at(self, path: bytes) -> Kind | None:
        """The kind in the newest known version, which may be newer than the shown one."""
        assert self._writing is not None
        view = max(self._newest, self._writing[0].view, key=_version)
        index = view.lookup(path)
        return view.stat(index).kind if index >= 0 else None

    def _add_parents(self, packer: Packer, target: bytes, mtime_ns: int) -> None:
        """Raises ConflictError if a folder above `target` is a file."""
        folder = split(target)[0]
        missing = []
        while folder and folder not in self._folders:
            kind = self._kind_at(folder)
            if folder in self._files or kind not in (None, Kind.FOLDER):
                raise ConflictError(f"{os.fsdecode(folder)!r} is a file", advice="delete it first")
            if kind == Kind.FOLDER:
                break
            missing.append(folder)
            folder = split(folder)[0]
        for path in reversed(missing):
            packer.add_folder(split(path), 0o755, mtime_ns)
            self._folders.add(path)


def _copy(source: object, spool: "tempfile.SpooledTemporaryFile[bytes]") -> None:
    """Raises UsageError for an object that is no file, or a file of text."""
    read = getattr(source, "read", None)
    if not callable(read):
        raise wrong_type("source", "the path of a file, bytes, or a binary file object", source)
    while data := read(_READ_BYTES):
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UsageError(
                f"source reads {type(data).__name__}, not bytes", advice="open it in binary mode"
            )
        spool.write(data)


def _version(view: Snapshot) -> int:
    return view.version

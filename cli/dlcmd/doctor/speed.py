"""Measures how fast this machine puts, lists and reads a dataset of made-up small files.

`dlcmd doctor --speed` calls it after all checks, so that nothing else is busy. Everything, also the
library's logs, snapshots and sockets, lies in a temporary folder, which is removed even after
Ctrl-C.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import diesel_fs
from diesel_fs import ingest
from diesel_fs.errors import DieselError, NoSpaceError, UsageError
from diesel_fs.ingest.options import PutOptions
from diesel_fs.ingest.sources.folder import FolderSource
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.repository.local import LocalRepository

from ..show.output import bytes_text
from .findings import Figure, Finding
from .probes import failed

FILES, FILE_BYTES = 10_000, 4096
"""At this size, the overhead of each file dominates."""

FILES_PER_FOLDER = 100

SPACE_FACTOR = 3
"""The files exist up to three times: as made up, packed, and in a log or a partial chunk."""

_DATASET = "speed"


def speed_findings() -> list[Finding]:
    findings: list[Finding] = []
    try:
        with _own_folder() as (work, cleanup):
            _check_space(work)
            for finding in _Measurement(work, cleanup).findings():
                findings.append(finding)
    except DieselError as error:
        findings.append(failed("speed", error, "name another folder in TMPDIR"))
    return findings


@contextmanager
def _own_folder() -> Iterator[tuple[Path, ExitStack]]:
    """Yields a temporary folder, also for the library's own files; and callbacks for the end, which
    no signal interrupts."""
    before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    cleanup = ExitStack()
    try:
        try:
            work = Path(tempfile.mkdtemp(prefix="diesel-speed-"))
        except OSError as error:
            raise NoSpaceError(f"nothing can be measured: {error.strerror}") from error
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        for name in before:
            os.environ[name] = str(work / name)
        yield work, cleanup
    finally:
        with _signals_ignored():
            cleanup.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signals_ignored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _check_space(work: Path) -> None:
    free, needed = shutil.disk_usage(work).free, SPACE_FACTOR * FILES * FILE_BYTES
    if free < needed:
        raise NoSpaceError(
            f"{work.parent} has {bytes_text(free)} free, and the files need {bytes_text(needed)}",
            advice="free some space there, or name another folder in TMPDIR",
        )


class _Measurement:
    """Each rate is measured once, so figures vary."""

    def __init__(self, work: Path, cleanup: ExitStack) -> None:
        self._work = work
        self._cleanup = cleanup
        self._source = work / "files"
        self._url = (work / "store").as_uri()

    def findings(self) -> Iterator[Finding]:
        self._make_files()
        yield self._put()
        yield self._read_many()
        yield from self._read_mount()

    def _make_files(self) -> None:
        for number in range(FILES):
            folder = self._source / f"{number // FILES_PER_FOLDER:05}"
            if number % FILES_PER_FOLDER == 0:
                folder.mkdir(parents=True)
            name = f"{number % FILES_PER_FOLDER:02}.bin"
            (folder / name).write_bytes(os.urandom(FILE_BYTES))

    def _put(self) -> Finding:
        with LocalRepository.open(self._url, create=True) as repository:
            source = FolderSource(self._source, None, "dlcmd doctor")
            put_s = _seconds(lambda: ingest.put(repository, _DATASET, source, b"", PutOptions()))
        return _content_finding("put", "a put packs", put_s)

    def _read_many(self) -> Finding:
        with diesel_fs.connect(_DATASET, self._url) as dataset:
            order = dataset.shuffle(seed=1, epoch=0)

            def read() -> None:
                for _ in dataset.read_many(order):
                    pass

            return _content_finding("api", "read_many of the Python API reads", _seconds(read))

    def _read_mount(self) -> Iterator[Finding]:
        """Compares the mount with plain files, which the kernel has in memory."""
        at = self._work / "mnt"
        self._cleanup.callback(_unmount, at)
        try:
            log_file = str(self._work / "mount.log")
            mount(MountRequest(self._url, _DATASET, str(at), log_file=log_file))
        except DieselError as error:
            yield Finding(
                "speed.mount", "warning", f"cannot mount here: {error.message}",
                error.advice or "see the other findings",
            )  # fmt: skip
            return
        session = str(stats(at).get("session", ""))
        scan_s, plain_scan_s = _seconds(lambda: _scan(at)), _seconds(lambda: _scan(self._source))
        entries = FILES + -(-FILES // FILES_PER_FOLDER)  # with the folders
        yield _finding(
            "scan", f"a mount (session {session}) lists", "entries", entries, scan_s, plain_scan_s
        )
        paths, plain_paths = _paths(at), _paths(self._source)
        _read_files(plain_paths)  # now the kernel has them in memory
        plain_s = _seconds(lambda: _read_files(plain_paths))
        for name, what in (("read", "a mount reads"), ("again", "a mount reads the same again,")):
            yield _content_finding(name, what, _seconds(lambda: _read_files(paths)), plain_s)


def _content_finding(name: str, what: str, seconds: float, plain_s: float | None = None) -> Finding:
    return _finding(name, what, "files", FILES, seconds, plain_s, FILES * FILE_BYTES)


def _finding(
    name: str,
    what: str,
    unit: str,
    count: int,
    seconds: float,
    plain_s: float | None = None,
    content_bytes: int = 0,
) -> Finding:
    figures: dict[str, Figure] = {"per_s": round(count / seconds, 1), "unit": unit}
    found = f"{what} {count / seconds:,.0f} {unit}/s"
    if content_bytes:
        figures["bytes_per_s"] = round(content_bytes / seconds)
        found += f" ({bytes_text(content_bytes / seconds)}/s)"
    if plain_s is not None:
        figures["plain_per_s"] = round(count / plain_s, 1)
        found += f"; of plain files in memory {count / plain_s:,.0f}/s"
    return Finding(f"speed.{name}", "ok", found, figures=figures)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return max(time.perf_counter() - start_s, 1e-9)


def _paths(top: Path) -> list[str]:
    return [
        f"{top}/{folder}/{name}"
        for folder in sorted(os.listdir(top))
        for name in sorted(os.listdir(top / folder))
    ]


def _read_files(paths: Iterable[str]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            file.read()


def _scan(top: Path) -> None:
    folders = [str(top)]
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _unmount(at: Path) -> None:
    with suppress(UsageError):  # nothing is mounted there
        umount(at, force=True)

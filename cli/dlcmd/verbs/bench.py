"""The verb `bench`: measures how fast this machine puts, lists and reads a dataset of small files.

It makes files up, in a temporary folder, and removes all that it has made, also where it is
interrupted. What the library keeps besides (logs, snapshots, sockets) goes to that folder, too.
"""

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

import diesel_fs
from diesel_fs import ingest
from diesel_fs.errors import DieselError, NoSpaceError, NoSuchDataset, UsageError
from diesel_fs.ingest.options import PutOptions
from diesel_fs.ingest.sources.folder import FolderSource
from diesel_fs.mounts import MountRequest, stats, umount
from diesel_fs.mounts import mount as mount_in_background
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.settings import Settings

from ..args.addresses import open_repository_from_flags
from ..args.options import folder_path, global_flags, option, size, verb
from ..show.output import bytes_text, print_json, print_line, print_table
from ..show.progress import ShowProgress, shown_progress

FILES_PER_FOLDER = 100

SPACE_FACTOR = 3
"""The files lie in the temporary folder up to three times: as made up, packed, and in a log or a
partial chunk."""

_COLUMNS = ("measure", "per second", "unit", "bytes per second", "plain files", "limited by")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `plain_per_s` is the same of the files in the temporary folder."""

    measure: str
    unit: str
    limit: str
    per_s: float = 0.0
    bytes_per_s: float | None = None
    plain_per_s: float | None = None
    failed: str = ""
    """Why it could not be measured."""

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.failed:
            return self.measure, "-", self.unit, "", "", self.failed
        return (
            self.measure,
            f"{self.per_s:,.0f}",
            self.unit,
            "" if self.bytes_per_s is None else bytes_text(self.bytes_per_s),
            "" if self.plain_per_s is None else f"{self.plain_per_s:,.0f}",
            self.limit,
        )

    def described(self) -> dict[str, object]:
        """The row in JSON."""
        if self.failed:
            return {"measure": self.measure, "failed": self.failed}
        return {
            "measure": self.measure,
            "per_s": round(self.per_s, 1),
            "unit": self.unit,
            "bytes_per_s": None if self.bytes_per_s is None else round(self.bytes_per_s),
            "plain_per_s": None if self.plain_per_s is None else round(self.plain_per_s, 1),
            "limited_by": self.limit,
        }


@verb("bench")
@option(
    "--files", type=click.IntRange(1, 10_000_000), metavar="N", default=10_000, show_default=True,
    help="How many files to make up.",
)  # fmt: skip
@option(
    "--size", "file_bytes", type=size, default="4K", show_default=True, help="How large each is."
)
@option(
    "--folder", type=folder_path, metavar="DIR",
    help="Where to make a temporary folder.  [env: TMPDIR; default: /tmp]",
)  # fmt: skip
def bench(files: int, file_bytes: int, folder: Path | None) -> None:
    """Measure how fast this machine puts, lists and reads a dataset of made-up small files.

    Without --url, the dataset lies in a folder. With --url, it is put there under a name of its own
    (`bench-...`), and deleted at the end; DIESEL_URL and the configuration file are not used for
    that. Nothing is left behind, also after Ctrl-C.

    "plain files" is the same for the files in the temporary folder, which the kernel has in memory.
    All is done once by one process (put: by several), so figures of small runs vary.

    \b
    Examples:
      dlcmd bench
      dlcmd bench --files 2000 --size 110K
      dlcmd --url 's3://bucket/prefix?meta=redis://host' bench
    """
    if file_bytes < 1:
        raise UsageError("--size 0 makes files without content", advice="name 1 or more")
    rows: list[Row] = []
    with _own_folder(folder) as (work, cleanup), shown_progress("bench", "steps") as show:
        _check_space(work, files * file_bytes)
        place = _Place(work, files, file_bytes, cleanup)
        for row in place.measure(show):
            rows.append(row)
    if global_flags().json:
        described = [row.described() for row in rows]
        print_json({"event": "done", "files": files, "size": file_bytes, "rows": described})
    elif not global_flags().quiet:
        print_line(f"{files:,} files of {bytes_text(file_bytes)}")
        print_table(_COLUMNS, [row.cells() for row in rows], _COLUMNS[1:2] + _COLUMNS[3:5])


@contextmanager
def _own_folder(folder: Path | None) -> Iterator[tuple[Path, ExitStack]]:
    """A temporary folder, in which the library keeps its files meanwhile; and what to call at the
    end, which no signal interrupts."""
    before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    cleanup = ExitStack()
    try:
        work = Path(tempfile.mkdtemp(prefix="diesel-bench-", dir=folder))
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
    """A second Ctrl-C does not end the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _check_space(work: Path, content_bytes: int) -> None:
    """Raises NoSpaceError where the files have no room."""
    free, needed = shutil.disk_usage(work).free, SPACE_FACTOR * content_bytes
    if free < needed:
        raise NoSpaceError(
            f"{work.parent} has {bytes_text(free)} free, and the files need {bytes_text(needed)}",
            advice="make fewer with --files, or name another folder with --folder",
        )


class _Place:
    """The files, the dataset and the mount of one run."""

    def __init__(self, work: Path, files: int, file_bytes: int, cleanup: ExitStack) -> None:
        self._work = work
        self._files = files
        self._file_bytes = file_bytes
        self._cleanup = cleanup
        self._dataset = f"bench-{secrets.token_hex(6)}"
        self._source = work / "files"
        self._settings: Settings = global_flags().settings()
        self._is_own = global_flags().url is None
        self._url = (work / "store").as_uri() if self._is_own else self._settings.repository_url

    def measure(self, show: ShowProgress) -> Iterator[Row]:
        """All rows. Raises DieselError."""
        steps = ("make files", "put", "API", "mount")
        for done, step in enumerate((self._make_files, self._put, self._read_by_api, self._mount)):
            show(done, len(steps))
            yield from step()
        show(len(steps), len(steps))

    def _make_files(self) -> Iterable[Row]:
        """Make the files up, and read them once, so that the kernel has them."""
        for number in range(self._files):
            folder = self._source / f"{number // FILES_PER_FOLDER:05}"
            if number % FILES_PER_FOLDER == 0:
                folder.mkdir(parents=True)
            (folder / f"{number % FILES_PER_FOLDER:02}.bin").write_bytes(
                os.urandom(self._file_bytes)
            )
        paths = self._paths(self._source)
        self._plain_read = self._rate(lambda: _read_files(paths))
        entries = _scan(self._source)
        self._plain_scan = entries / _seconds(lambda: _scan(self._source))
        return ()

    def _put(self) -> Iterable[Row]:
        with self._repository() as repository:
            self._cleanup.callback(self._delete_dataset)
            source = FolderSource(self._source, None, "dlcmd bench")
            put_s = _seconds(
                lambda: ingest.put(repository, self._dataset, source, b"", PutOptions())
            )
        yield self._content_row("put", "packing (processors), and the disk or store", put_s)

    @contextmanager
    def _repository(self) -> Iterator[Repository]:
        if self._is_own:
            with LocalRepository.open(self._url, create=True) as repository:
                yield repository
        else:
            with open_repository_from_flags() as repository:
                yield repository

    def _delete_dataset(self) -> None:
        with suppress(NoSuchDataset), self._repository() as repository:
            repository.delete_dataset(self._dataset)

    def _read_by_api(self) -> Iterable[Row]:
        credentials = None if self._is_own else self._settings.credentials
        with diesel_fs.connect(
            self._dataset,
            self._url,
            credentials.user if credentials else None,
            credentials.key_text if credentials else None,
        ) as dataset:
            order = dataset.shuffle(seed=1, epoch=0)
            paths = dataset.snapshot.paths(order)

            def read_many() -> None:
                for _ in dataset.read_many(order):
                    pass

            def get() -> None:
                for path in paths:
                    dataset.get(path)

            def stat() -> None:
                for path in paths:
                    dataset.stat(path)

            yield self._content_row(
                "API: read_many", "the store; checksums (one processor)", _seconds(read_many)
            )
            yield self._content_row(
                "API: get", "Python (one processor); chunks are in memory", _seconds(get)
            )
            yield self._lookup_row("API: stat", "Python (one processor)", _seconds(stat))
            yield self._lookup_row(
                "API: stat_many",
                "memory (the snapshot)",
                _seconds(lambda: dataset.stat_many(paths)),
            )

    def _mount(self) -> Iterable[Row]:
        at = self._work / "mnt"
        request = MountRequest(
            self._url, self._dataset, str(at), log_file=str(self._work / "mount.log")
        )
        if not self._is_own:
            request = request.with_credentials(self._settings.credentials)
        self._cleanup.callback(_unmount, at)
        try:
            mount_in_background(request)
        except DieselError as error:
            reason = f"cannot mount here: {error.message}"
            for name in ("scan of a mount", "read through a mount", "the same again"):
                yield Row(name, "files", "", failed=reason)
            return
        kind = str(stats(at).get("session", ""))
        entries = 0

        def scan() -> None:
            nonlocal entries
            entries = _scan(at)

        scan_s = _seconds(scan)
        in_kernel = "the kernel (the tree is in it)"
        yield Row(
            "scan of a mount", "entries",
            in_kernel if kind == "native" else f"requests for names (session {kind})",
            entries / scan_s, None, self._plain_scan,
        )  # fmt: skip
        paths = self._paths(at)
        for name, limit in (
            ("read through a mount", "the store, and loading into the page cache"),
            ("the same again", f"system calls (session {kind})"),
        ):
            yield self._content_row(
                name, limit, _seconds(lambda: _read_files(paths)), self._plain_read
            )

    def _paths(self, top: Path) -> list[str]:
        return [
            f"{top}/{folder}/{name}"
            for folder in sorted(os.listdir(top))
            for name in sorted(os.listdir(top / folder))
        ]

    def _rate(self, work: Callable[[], object]) -> float:
        work()
        return self._files / _seconds(work)

    def _content_row(
        self, name: str, limit: str, seconds: float, plain_per_s: float | None = None
    ) -> Row:
        bytes_per_s = self._files * self._file_bytes / seconds
        return Row(name, "files", limit, self._files / seconds, bytes_per_s, plain_per_s)

    def _lookup_row(self, name: str, limit: str, seconds: float) -> Row:
        return Row(name, "look-ups", limit, self._files / seconds)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return max(time.perf_counter() - start_s, 1e-9)


def _read_files(paths: Iterable[str]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            file.read()


def _scan(top: Path) -> int:
    """List a folder and all below it, with the attributes of each entry. Returns how many."""
    entries, folders = 0, [str(top)]
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                entries += 1
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return entries


def _unmount(at: Path) -> None:
    with suppress(UsageError):  # nothing is mounted there
        umount(at, force=True)

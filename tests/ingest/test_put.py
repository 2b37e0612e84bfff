"""Puts of folders: which entries are packed, skipped, named and deleted, and which are never
read.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs import ingest
from diesel_fs.errors import ConflictError, DieselError, UsageError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN, ENTRIES_MAX
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions
from diesel_fs.ingest.options import PutReport
from diesel_fs.ingest.packer import start_packer
from diesel_fs.ingest.sources.folder import _FolderPut
from diesel_fs.ingest.sources.walk import open_folder
from diesel_fs.ingest.worker import WorkerHandle
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.repository.validation import PUT_WINDOW_S, ValidatedChunk

from ..datasets import dataset_state
from ..forks import in_child
from ..storage.objects.faulty_store import Fault, FaultyStore
from ..trees import facts, odd_tree, write

SMALL = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=2)


def put(repository: LocalRepository, source: Path, **options: object) -> PutReport:
    return ingest.put(repository, "ds", FolderSource(source), options=PutOptions(jobs=2, **options))  # type: ignore[arg-type]  # what came is passed on


def files(view: Snapshot) -> list[bytes]:
    return sorted(view.path(int(i)) for i in view.files())


def test_a_tree_of_all_oddities(repository: LocalRepository, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    report = put(repository, source)
    assert report.failed == []
    assert dataset_state(repository) == facts(source)
    assert report.files == 12
    assert report.version == repository.view("ds").version


def test_large_files_in_extents(repository: LocalRepository, tmp_path: Path) -> None:
    """FAULTS I8."""
    sizes = [n * CHUNK_BYTES_MIN + d for n in (1, 2, 5) for d in (-1, 0, 1)]
    source = write(
        tmp_path / "source",
        {f"{i:02}-{n}": os.urandom(n) if i % 2 else bytes(n) for i, n in enumerate(sizes)}
        | {f"{i:02}-small": b"between" for i in range(len(sizes))},
    )
    report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    assert report.failed == []
    assert dataset_state(repository) == facts(source)
    assert report.files == 2 * len(sizes)


def test_put_again_reads_nothing(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = odd_tree(tmp_path / "source")
    first = put(repository, source)

    def never(*_: object) -> int:
        raise AssertionError("a file was read")

    # the packing processes are forks, so this holds for them too
    monkeypatch.setattr(os, "readv", never)
    again = put(repository, source)
    assert (again.files, again.chunks, again.failed) == (0, 0, [])
    assert again.version == first.version
    assert again.unchanged == len(facts(source))


def test_put_again_takes_only_changed_files(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1", "b": b"2", "d/c": b"3"})
    put(repository, source)
    (source / "b").write_bytes(b"22")
    (source / "d/c").chmod(0o600)
    (source / "new").write_bytes(b"4")
    report = put(repository, source)
    assert report.files == 3
    assert dataset_state(repository) == facts(source)


def test_I3_delete_spares_a_folder_that_cannot_be_opened_again(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, and then NFS reports ESTALE: its content is not gone."""
    source = write(tmp_path / "source", {"d/a": b"1", "d/b": b"2", "gone": b"3"})
    put(repository, source)
    (source / "gone").unlink()

    def stale(root: int, path: bytes) -> int:
        if path == b"d":
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_folder(root, path)

    monkeypatch.setattr("diesel_fs.ingest.compare.open_folder", stale)
    report = put(repository, source, delete=True)
    assert [path for path, _ in report.failed] == [b"d"]
    assert report.deleted == 1
    assert files(repository.view("ds")) == [b"d/a", b"d/b"]


def test_empty_folders_go_in_many_messages(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    for number in range(600):
        (source / f"{number}").mkdir(parents=True)
    counts = []
    real = WorkerHandle.send

    def send(self: WorkerHandle, *message: object) -> None:
        if message[0] == "pack":
            assert isinstance(message[2], list)
            counts.append(len(message[2]))
        real(self, *message)

    monkeypatch.setattr(WorkerHandle, "send", send)
    put(repository, source)
    assert sum(counts) == 601
    assert max(counts) <= 256


@pytest.fixture
def commit_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = LocalWriteSession.commit_all

    def commit_all(self: LocalWriteSession, chunks: Sequence[ValidatedChunk]) -> int:
        sizes.append(len(chunks))
        return real(self, chunks)

    monkeypatch.setattr(LocalWriteSession, "commit_all", commit_all)
    return sizes


ONE_JOB = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=1)


def rarely_committed(folder: Path, entries_max: int = ENTRIES_MAX) -> FolderSource:
    """A source whose first chunk is committed at once, and others after an hour or at the end."""
    return FolderSource(folder, commit_every_s=3600, commit_entries_max=entries_max)


def test_chunks_are_committed_together_and_counted_then(
    repository: LocalRepository, tmp_path: Path, commit_sizes: list[int]
) -> None:
    """So a put that stores a chunk now and then never waits."""
    folder = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(20)})
    reported_files: list[int] = []

    def progress(report: PutReport) -> None:
        assert report.files <= repository.meta.head("ds").files
        reported_files.append(report.files)

    source = rarely_committed(folder)
    report = ingest.put(repository, "ds", source, options=ONE_JOB, progress=progress)
    assert commit_sizes == [1, report.chunks - 1]
    assert (reported_files[-1], report.files) == (20, 20)
    assert dataset_state(repository) == facts(folder)


def test_the_entries_of_a_commit_have_a_limit(
    repository: LocalRepository, tmp_path: Path, commit_sizes: list[int]
) -> None:
    folder = write(tmp_path / "source", {f"{i}": os.urandom(20_000) for i in range(40)})
    report = ingest.put(repository, "ds", rarely_committed(folder, 6), options=ONE_JOB)
    assert sum(commit_sizes) == report.chunks > 8
    assert max(commit_sizes) <= 2


def with_fault(repository: LocalRepository, fault: Fault) -> LocalRepository:
    store = FaultyStore(repository.objects, fault)
    return LocalRepository(store, repository.meta, url=repository.url)


def test_durable_chunks_are_committed_when_a_put_fails(
    repository: LocalRepository, tmp_path: Path, commit_sizes: list[int]
) -> None:
    folder = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(20)})
    full = with_fault(repository, Fault("put", "/chunks/", error=DieselError("no more"), skip=4))
    with pytest.raises(DieselError, match="no more"):
        ingest.put(full, "ds", rarely_committed(folder), options=ONE_JOB)
    assert commit_sizes == [1, 3]
    stored = list(repository.chunk_ids(repository.dataset("ds").identity))
    assert len(stored) == repository.meta.head("ds").chunks == 4


def test_durable_chunks_are_committed_after_a_ctrl_c(
    repository: LocalRepository,
    tmp_path: Path,
    commit_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(4)})
    real = _FolderPut._answer

    def answer(self: _FolderPut, worker: WorkerHandle) -> None:
        real(self, worker)
        if worker.finished:
            raise KeyboardInterrupt

    monkeypatch.setattr(_FolderPut, "_answer", answer)
    with pytest.raises(KeyboardInterrupt):
        ingest.put(repository, "ds", rarely_committed(folder), options=ONE_JOB)
    assert sum(commit_sizes) > commit_sizes[0] == 1
    assert repository.meta.head("ds").chunks == sum(commit_sizes)


def test_a_store_error_is_not_one_of_a_file(repository: LocalRepository, tmp_path: Path) -> None:
    """The store raises an OSError while files are being read."""
    source = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(20)})
    error = OSError(errno.EIO, "Input/output error")
    broken = with_fault(repository, Fault("put", "/chunks/", error=error))
    with pytest.raises(DieselError, match="a chunk could not be stored"):
        ingest.put(broken, "ds", FolderSource(source), options=SMALL)


def test_a_ctrl_c_while_a_chunk_is_stored_leaves_the_chunk_as_it_was(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", {"a": os.urandom(60_000)})
    session = repository.begin("ds")
    packer = start_packer(session, CHUNK_BYTES_MIN, "auto")
    real, once = Future.result, [True]

    def result(self: "Future[object]", timeout: float | None = None) -> object:
        if once:
            once.pop()
            raise KeyboardInterrupt
        return real(self, timeout)

    folder = os.open(source, os.O_RDONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", result)
            with suppress(KeyboardInterrupt):
                for number in range(100):
                    packer.add_file(folder, b"a", (b"", b"%d" % number))
        assert not once
        with pytest.raises(DieselError, match="a chunk could not be stored"):
            packer.finish()
    finally:
        os.close(folder)
        packer.close()


def test_M10_a_glob_cannot_take_for_ever(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a" * 250: b""})
    put(repository, source, exclude=("*a" * 60 + "b", "(((((*)*)*"))
    assert len(repository.view("ds").files()) == 1


def test_paths_below_the_source(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1", "d/b": b"2", "d/c": b"3"})
    report = ingest.put(
        repository, "ds", FolderSource(source, paths=[b"a", b"d/c", b"gone"]), b"in/here", SMALL
    )
    assert files(repository.view("ds")) == [b"in/here/a", b"in/here/d/c"]
    assert [path for path, _ in report.failed] == [b"gone"]


def test_I2_I4_special_files_are_skipped(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"good": b"1"})
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
        report = put(repository, source)
    assert sorted(path for path, _ in report.failed) == [b"pipe", b"socket"]
    assert files(repository.view("ds")) == [b"good"]


def test_I4_a_file_with_content_whose_size_is_zero(repository: LocalRepository) -> None:
    report = ingest.put(
        repository, "ds", FolderSource(Path("/proc/self"), paths=[b"status"]), options=SMALL
    )
    assert report.failed == [(b"status", "its size is 0, but it has bytes")]
    assert len(repository.view("ds").files()) == 0


def touch_when_read(
    monkeypatch: pytest.MonkeyPatch, times: int, change: Callable[[int], None]
) -> None:
    """Each process finds the file changed at its first `times` reads of more than a few bytes."""
    real, left = os.readv, [times]

    def readv(file: int, buffers: Sequence[memoryview]) -> int:
        count = real(file, buffers)
        if count > 1000 and left[0]:
            left[0] -= 1
            change(file)
        return count

    monkeypatch.setattr(os, "readv", readv)


def test_I1_a_file_that_keeps_changing(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a small file nor one of several extents is ever packed mixed."""
    for size in (2000, 3 * CHUNK_BYTES_MIN):
        source = write(tmp_path / f"source-{size}", {"calm": b"1", "restless": bytes(size)})
        touch_when_read(monkeypatch, 1000, os.utime)
        report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        assert [path for path, _ in report.failed] == [b"restless"]
        assert "changed" in report.failed[0][1]
        assert files(repository.view("ds")) == [b"calm"]


def test_I1_a_file_that_settles_is_read_again(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, change in ((2000, None), (3 * CHUNK_BYTES_MIN, None), (5000, 6000), (6000, 5000)):
        source = write(tmp_path / f"source-{size}", {"restless": b"x" * size})
        touch_when_read(monkeypatch, 2, partial(rewrite, source / "restless", change))
        report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        assert report.failed == []
        assert dataset_state(repository)[b"restless"] == facts(source)[b"restless"]


def rewrite(path: Path, size: int | None, _: int) -> None:
    if size is None:
        os.utime(path)
    else:
        path.write_bytes(b"y" * size)


def test_I3_unreadable_files_and_folders_are_named(tmp_path: Path) -> None:
    """As another user, since root reads everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    source = write(tmp_path / "source", {"good": b"1", "secret": b"2", "closed/x": b"3"})
    (source / "secret").chmod(0)
    (source / "closed").chmod(0)
    store = tmp_path / "store"
    store.mkdir()
    for path in (store, *tmp_path.parents, tmp_path):
        if path.is_relative_to("/tmp"):  # where pytest's folders belong to this user alone
            path.chmod(path.stat().st_mode | 0o055)
    store.chmod(0o777)

    def put_as_nobody() -> None:
        os.environ["XDG_CACHE_HOME"] = str(store / "cache")
        os.setuid(65534)
        with LocalRepository.open((store / "repository").as_uri(), create=True) as repository:
            report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
            assert sorted(path for path, _ in report.failed) == [b"closed", b"secret"]
            assert files(repository.view("ds")) == [b"good"]

    assert in_child(put_as_nobody) == 0


def test_a_path_is_a_file_or_a_folder(repository: LocalRepository, tmp_path: Path) -> None:
    """This holds without `--delete`."""
    there = write(tmp_path / "one", {"a/x": b"1", "b": b"2", "deep/f": b"3"})
    (there / "empty").mkdir()
    (there / "link").symlink_to("b")
    put(repository, there)
    before = dataset_state(repository)
    other = write(
        tmp_path / "other",
        {"a": b"a folder", "b/y/z": b"", "deep/f/x": b"", "empty": b"", "link/x": b"", "new": b""},
    )
    os.utime(other / "deep", ns=(0, (there / "deep").stat().st_mtime_ns))
    os.utime(other, ns=(0, there.stat().st_mtime_ns))
    for options in ({"dry_run": True}, {"checksum": True}, {}):
        assert dict(put(repository, other, **options).failed) == {
            b"a": "refused: a is a folder of the dataset; remove it first",
            b"b": "refused: b is a file of the dataset; remove it first",
            b"deep/f": "refused: deep/f is a file of the dataset; remove it first",
            b"empty": "refused: empty is a folder of the dataset; remove it first",
            b"link": "refused: link is a file of the dataset; remove it first",
        }
    after = dataset_state(repository)
    assert after.pop(b"new")[3] == b""
    assert after == before
    with pytest.raises(ConflictError):
        ingest.put(repository, "ds", FolderSource(other), b"b/below", SMALL)
    assert put(repository, other, delete=True).failed == []
    assert dataset_state(repository) == facts(other)


def test_a_listed_path_goes_below_no_file(repository: LocalRepository, tmp_path: Path) -> None:
    put(repository, write(tmp_path / "one", {"a": b"1"}))
    other = write(tmp_path / "other", {"a/b/x": b"2", "c/y": b"3"})
    report = ingest.put(
        repository, "ds", FolderSource(other, paths=[b"a/b/x", b"c/y"]), options=SMALL
    )
    assert [path for path, _ in report.failed] == [b"a/b"]
    assert files(repository.view("ds")) == [b"a", b"c/y"]


def test_I12_source_in_the_store_or_around_it(repository: LocalRepository, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "store", tmp_path / "store" / "datasets"):
        source.mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="lie in each other"):
            put(repository, source)


def test_I13_bad_numbers() -> None:
    for bad in (0, 1, -1, 1 << 40, CHUNK_BYTES_MIN - 1):
        with pytest.raises(UsageError):
            PutOptions(chunk_bytes=bad)
    for jobs in (-1, 10**6):
        with pytest.raises(UsageError):
            PutOptions(jobs=jobs)


def test_links_are_never_followed(repository: LocalRepository, tmp_path: Path) -> None:
    """A folder that becomes a link between listing and opening leads nowhere."""
    secret = write(tmp_path / "secret", {"x": b"secret"})
    source = write(tmp_path / "source", {"d/x": b"mine"})
    (source / "d/x").unlink()
    (source / "d").rmdir()
    (source / "d").symlink_to(secret)
    report = ingest.put(repository, "ds", FolderSource(source, paths=[b"d/x"]), options=SMALL)
    assert len(report.failed) == 1
    assert len(repository.view("ds").files()) == 0


def test_a_chunk_that_is_older_than_the_put_window_is_made_again(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a night's suspend, for the first chunk to be committed."""
    source = odd_tree(tmp_path / "source")
    real, late = LocalRepository.validate_chunk, [True]

    def admit(
        self: LocalRepository, identity: UUID, preamble: bytes, header: bytes
    ) -> ValidatedChunk:
        if late.pop() if late else False:
            with monkeypatch.context() as clock:
                now = time.time() + 2 * PUT_WINDOW_S
                clock.setattr(time, "time", lambda: now)
                return real(self, identity, preamble, header)
        return real(self, identity, preamble, header)

    monkeypatch.setattr(LocalRepository, "validate_chunk", admit)
    report = put(repository, source)
    assert not late
    assert report.failed == []
    assert dataset_state(repository) == facts(source)
    assert len(list(repository.chunk_ids(repository.dataset("ds").identity))) == report.chunks

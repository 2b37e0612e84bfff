"""FAULTS I: oddities of sources, and how a dataset gives each back; A7: an interrupted put."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.dataset import connect
from diesel_fs.client.extract import get
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.entries import Kind, Stat
from diesel_fs.ingest import FileSource, FolderSource, PutOptions, TarSource
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.stored import LocalWriteSession

from ..bench.memory import peak_pss_bytes
from ..datasets import dataset_state, stored_bytes
from ..forks import in_child
from ..trees import Facts, facts, odd_tree, write
from .test_tar import tar_of

SMALL = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=2)
SECOND_NS = 1_000_000_000
READER_BYTES = 256 << 20  # memory of a verb while it reads contents
MEMORY_BYTES_MAX = 256 << 20  # of all processes: interpreters, numpy, a few chunks of 4 MiB


def got(repository: LocalRepository, dest: Path) -> Facts:
    view = repository.view("ds")
    reader = EntryReader(view, repository.objects, 1 << 20)
    try:
        assert get(view, reader, b"", dest).failed == []
    finally:
        reader.close()
    return facts(dest)


def rebuilt(repository: LocalRepository) -> Facts:
    repository.recover("ds")
    assert repository.verify("ds").problems == []
    return dataset_state(repository)


def tree_put(url: str, source: Path) -> int:
    with LocalRepository.open(url, create=True) as repository:
        return ingest.put(repository, "ds", FolderSource(source), options=SMALL).chunks


def file_put(url: str, source: Path) -> int:
    with LocalRepository.open(url, create=True) as repository:
        return ingest.put(repository, "ds", FileSource(source / "large"), b"large", SMALL).chunks


def tar_put(url: str, source: Path) -> int:
    data = io.BytesIO(tar_of(("large", (source / "large").read_bytes())))
    with LocalRepository.open(url, create=True) as repository:
        return ingest.put(repository, "ds", TarSource(data), options=SMALL).chunks


def api_put(url: str, source: Path) -> int:
    with connect("ds", url, create=True) as dataset:
        dataset.put(source / "large", "large")
    return 0


def end_by_kill(step: str) -> None:
    """This process dies after the put is committed and before it reports that."""
    finish = LocalWriteSession.finish

    def killed(session: LocalWriteSession) -> int:
        if step == "after the snapshot":
            finish(session)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(LocalWriteSession, "finish", killed)  # noqa: B010


@pytest.mark.parametrize("step", ["before the snapshot", "after the snapshot"])
@pytest.mark.parametrize("put", [tree_put, file_put, tar_put, api_put])
def test_A7_killed_after_the_commit_and_before_the_acknowledgement(
    tmp_path: Path, put: Callable[[str, Path], int], step: str
) -> None:
    source = write(tmp_path / "source", {"large": os.urandom(150_000), "d/small": b"1"})
    url = (tmp_path / "store").as_uri()

    def killed_put() -> None:
        end_by_kill(step)
        put(url, source)

    ended = in_child(killed_put)
    assert ended == -signal.SIGKILL, "A16: the kill came after the end: proves nothing"
    with LocalRepository.open(url) as repository:
        before = dataset_state(repository)
        counted = repository.view("ds").file_count, repository.view("ds").byte_count
        assert before[b"large"] == facts(source)[b"large"] or put is tar_put
        assert before[b"large"][-1] == (source / "large").read_bytes()
    chunks = put(url, source)
    assert chunks == 0
    with LocalRepository.open(url) as repository:
        view = repository.view("ds")
        assert (view.file_count, view.byte_count) == counted
        assert repository.snapshots.newest(view.identity) == view.version
        assert dataset_state(repository) == before == rebuilt(repository)
        if put is tree_put:
            assert before == facts(source)


def test_I6_hard_links_are_stored_per_path(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"one": os.urandom(5000), "large": os.urandom(150_000)})
    (source / "d").mkdir()
    os.link(source / "one", source / "d/two")
    os.link(source / "large", source / "d/large too")
    report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    assert (report.files, report.content_bytes) == (4, 2 * 155_000)
    assert dataset_state(repository) == facts(source) == got(repository, tmp_path / "out")
    assert (tmp_path / "out/one").stat().st_nlink == 1
    (source / "one").unlink()
    (source / "one").write_bytes(b"another")
    ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    assert dataset_state(repository)[b"d/two"][-1] == (source / "d/two").read_bytes() != b"another"
    assert rebuilt(repository) == facts(source)


def dlcmd_peak_bytes(*arguments: str | Path) -> int:
    """Return the most memory that it and its packing processes took together. It is sampled,
    because the kernel's own maximum for a child begins with that of the process that forked it."""
    command = [sys.executable, "-m", "dlcmd", "-q", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return peak_pss_bytes(command, environment)


def same_content(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while piece := left.read(1 << 20):
            if right.read(1 << 20) != piece:
                return False
        return not right.read(1)


def test_I7_a_sparse_file_is_small_in_the_store_and_comes_back_equal(tmp_path: Path) -> None:
    source, size = tmp_path / "source", 448 << 20
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.write(os.urandom(5000))
        file.seek(100_000_001)
        file.write(b"an island")
        file.truncate(size)
    assert (source / "sparse").stat().st_blocks * 512 < size // 10, "it is not sparse: no proof"
    url = f"--url={(tmp_path / 'store').as_uri()}"
    assert dlcmd_peak_bytes("put", url, "--jobs", "2", source, "ds") < MEMORY_BYTES_MAX
    with LocalRepository.open((tmp_path / "store").as_uri()) as repository:
        assert repository.view("ds").byte_count == size
        assert stored_bytes(repository) < size // 50
    back = dlcmd_peak_bytes("get", url, "ds/sparse", tmp_path / "back")
    assert back < READER_BYTES + MEMORY_BYTES_MAX // 2 < size
    assert same_content(source / "sparse", tmp_path / "back")


def test_I7_without_compression_a_sparse_file_is_stored_dense(
    repository: LocalRepository, tmp_path: Path
) -> None:
    size = 4 << 20
    (tmp_path / "source").mkdir()
    with (tmp_path / "source/sparse").open("wb") as file:
        file.truncate(size)
    wanted = PutOptions(compress="none", jobs=1)
    ingest.put(repository, "ds", FolderSource(tmp_path / "source"), options=wanted)
    assert stored_bytes(repository) > size
    assert dataset_state(repository) == facts(tmp_path / "source")


def test_I9_no_files_at_all(repository: LocalRepository, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o750)
    ingest.put(repository, "ds", FolderSource(tmp_path / "empty"), options=SMALL)
    view = repository.view("ds")
    assert (view.entry_count, view.file_count, view.byte_count) == (1, 0, 0)
    assert dataset_state(repository) == facts(tmp_path / "empty") == rebuilt(repository)
    assert got(repository, tmp_path / "out") == facts(tmp_path / "empty")


def test_I9_nothing_but_folders(repository: LocalRepository, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(600):
        (source / f"{number}/in").mkdir(parents=True)
    (source / "7/in").chmod(0o711)
    os.utime(source / "7", ns=(0, 7))
    report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    assert (report.files, report.entries, report.failed) == (0, 1201, [])
    assert dataset_state(repository) == facts(source) == rebuilt(repository)
    assert got(repository, tmp_path / "out") == facts(source)


def test_I9_many_tiny_files(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(
        tmp_path / "source", {f"d{i % 7}/{i}": i.to_bytes(4, "big")[i % 5 :] for i in range(5000)}
    )
    report = ingest.put(repository, "ds", FolderSource(source), options=PutOptions(jobs=2))
    assert (report.files, report.failed) == (5000, [])
    assert report.chunks <= 4  # of 4 MiB, from two processes
    assert dataset_state(repository) == facts(source) == rebuilt(repository)


def test_I11_a_path_that_is_listed_twice(repository: LocalRepository, tmp_path: Path) -> None:
    """Other spellings of it are refused, by name."""
    source = write(tmp_path / "source", {"a": b"1", "d/b": b"2"})
    paths = [b"a", b"d/b", b"a", b"d/b", b"d", b"./a", b"d/../a"]
    report = ingest.put(repository, "ds", FolderSource(source, paths=paths), options=SMALL)
    assert sorted(path for path, _ in report.failed) == [b".", b"d/.."]
    for state in (dataset_state(repository), rebuilt(repository)):
        assert sorted(state) == [b".", b"a", b"d", b"d/b"]
    counts = repository.view("ds")
    assert (counts.file_count, counts.byte_count) == (2, 2)


def test_I11_the_last_of_equal_names_in_a_tar_wins(repository: LocalRepository) -> None:
    """Live and rebuilt; names that differ only in case are two."""
    data = tar_of(("a", b"1"), ("A", b"upper"), ("./a", b"2"), ("b", b"3"), (".//b", b"odd"))
    report = ingest.put(repository, "ds", TarSource(io.BytesIO(data)), options=SMALL)
    assert [path for path, _ in report.failed] == [b"/b"]
    for state in (dataset_state(repository), rebuilt(repository)):
        contents = {path: fact[-1] for path, fact in state.items() if fact[0] == "file"}
        assert contents == {b"a": b"2", b"A": b"upper", b"b": b"3"}


def test_I11_two_sources_with_the_same_names(repository: LocalRepository, tmp_path: Path) -> None:
    """The times of the files do not matter."""
    first = write(tmp_path / "first", {"same": b"new file", "one": b"1"})
    second = write(tmp_path / "second", {"same": b"old file", "two": b"2"})
    os.utime(second / "same", ns=(0, 5))
    for source in (first, second):
        ingest.put(repository, "ds", FolderSource(source), b"in", SMALL)
    for state in (dataset_state(repository), rebuilt(repository)):
        there = {path for path, fact in state.items() if fact[0] == "file"}
        assert there == {b"in/same", b"in/one", b"in/two"}
        assert state[b"in/same"] == facts(second)[b"same"]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_I15_modes_under_any_umask(repository: LocalRepository, tmp_path: Path, umask: int) -> None:
    source = write(tmp_path / "source", {f"{mode:04o}": b"x" for mode in range(0, 0o10000, 0o111)})
    for path in source.iterdir():
        path.chmod(int(path.name, 8))
    (source / "folder").mkdir()
    (source / "folder").chmod(0o7775)
    before = os.umask(umask)
    try:
        report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        seen = got(repository, tmp_path / "out")
    finally:
        os.umask(before)
    unreadable = [path for path, _ in report.failed]
    assert not unreadable or os.geteuid() != 0
    assert seen == {path: fact for path, fact in facts(source).items() if path not in unreadable}
    modes = {(tmp_path / "out" / os.fsdecode(path)).lstat().st_mode & 0o7777 for path in seen}
    assert not [mode for mode in modes if mode & 0o7000]
    identity = repository.dataset("ds").identity
    for chunk in repository.chunk_ids(identity):
        header = repository.read_header(identity, chunk)
        assert int(header.records["mode"].max()) <= 0o777


TIMES = {
    "one ns before 1970": -1,
    "1901": -(1 << 31) * SECOND_NS - 1,
    "before 1901": -(1 << 33) * SECOND_NS + 123_456_789,
    "1970": 0,
    "2038": (1 << 31) * SECOND_NS + 1,
    "2106, its last second": (1 << 32) * SECOND_NS - 1,
    "after 2106": (1 << 32) * SECOND_NS,
    "after 2242": (1 << 33) * SECOND_NS + 999_999_999,
    "the first of all": -(1 << 63),
    "the last of all": (1 << 63) - 1,
}


def test_I15_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Through the API, which does not depend on a file system's resolution."""
    url = (tmp_path / "store").as_uri()
    with connect("ds", url, create=True) as dataset:
        for name, mtime_ns in TIMES.items():
            dataset.put(b"x", name, mtime_ns=mtime_ns)
    with LocalRepository.open(url) as repository:
        for _ in ("live", "rebuilt"):
            view = repository.view("ds")
            assert {name: view.stat(view.lookup(name.encode())).mtime_ns for name in TIMES} == TIMES
            rebuilt(repository)


def test_I15_times_of_files_links_and_folders(repository: LocalRepository, tmp_path: Path) -> None:
    source, kept = tmp_path / "source", 0
    source.mkdir()
    for number, mtime_ns in enumerate(TIMES.values()):
        write(source, {f"f{number}": b"x", f"d{number}/x": b""})
        (source / f"l{number}").symlink_to("f0")
        for name in (f"f{number}", f"d{number}", f"l{number}"):
            try:
                os.utime(source / name, ns=(0, mtime_ns), follow_symlinks=False)
            except OSError:  # more than this file system can keep
                continue
            kept += (source / name).lstat().st_mtime_ns == mtime_ns
    assert kept >= 12, "this file system keeps no such times: proves nothing"
    assert ingest.put(repository, "ds", FolderSource(source), options=SMALL).failed == []
    assert dataset_state(repository) == facts(source) == rebuilt(repository)
    assert got(repository, tmp_path / "out") == facts(source)
    assert ingest.put(repository, "ds", FolderSource(source), options=SMALL).unchanged == len(
        facts(source)
    )


def test_I15_an_implicit_folder(repository: LocalRepository) -> None:
    """A tar need not name its folders."""
    data = tar_of(("d/e/x", b"1"))
    ingest.put(repository, "ds", TarSource(io.BytesIO(data)), options=SMALL)
    view = repository.view("ds")
    for path in (b"d", b"d/e"):
        assert view.stat(view.lookup(path)) == Stat(Kind.FOLDER, 0o755, 0, 0)
    session = repository.begin("ds")
    session.delete([b"d/e/x"])
    session.finish()
    assert repository.view("ds").entry_count == 1


def test_N4_names_and_targets_that_are_not_text(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    names = [b"\xff", b"d\xc3/\x80\xbf", b"\xed\xb3\xbf", b"\xed\xa0\x80", b"\xc0\xae\xc0\xae"]
    texts = [os.fsdecode(name) for name in names]
    with connect("ds", url, create=True) as dataset:
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            dataset.put(b"%d" % number, text if number % 2 else name)
        dataset.flush()
        for given in (names, texts):
            assert [bytes(each) for each in dataset.read_many(given)] == [
                b"%d" % number for number in range(len(names))
            ]
            assert [dataset.get(each) for each in given] == [b"%d" % n for n in range(len(names))]
            assert len(dataset.stat_many(given).size) == len(names)
        dataset.save_meta(tmp_path / "snapshot")
        assert dataset.load_meta(tmp_path / "snapshot")
        dataset.delete(texts[0])
    with LocalRepository.open(url) as repository:
        state = dataset_state(repository)
        assert {path for path, fact in state.items() if fact[0] == "file"} == {*names[1:]}
        assert rebuilt(repository) == state


def test_N4_a_tree_and_a_tar_of_such_names(repository: LocalRepository, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    raw = os.fsencode(source)
    os.mkdir(raw + b"/\xed\xa0\x80 folder")
    os.symlink(b"\xed\xa0\x80\xff", raw + b"/\xed\xa0\x80 folder/\xfe link")
    os.mkfifo(raw + b"/\xff pipe")
    report = ingest.put(repository, "ds", FolderSource(source), b"\xfe prefix", SMALL)
    assert [path for path, _ in report.failed] == [b"\xff pipe"]
    os.unlink(raw + b"/\xff pipe")
    tar = subprocess.run(
        ["tar", "--format=pax", "-cC", raw, "."], check=True, capture_output=True
    ).stdout
    with LocalRepository.open((tmp_path / "other").as_uri(), create=True) as other:
        assert ingest.put(other, "ds", TarSource(io.BytesIO(tar)), options=SMALL).failed == []
        assert set(dataset_state(other)) == set(facts(source))
        assert rebuilt(other) == dataset_state(other)


def test_N4_text_that_encodes_no_bytes_is_a_usage_error(tmp_path: Path) -> None:
    with connect("ds", (tmp_path / "store").as_uri(), create=True) as dataset:
        calls: list[Callable[[str], object]] = [
            dataset.get,
            dataset.stat,
            dataset.ls,
            dataset.delete,
            lambda path: dataset.put(b"x", path),
            lambda path: list(dataset.read_many([path])),
        ]
        failures = []
        for call in calls:
            try:
                call("\ud800")
            except Exception as error:
                failures.append(type(error).__name__)
        assert failures == ["UsageError"] * len(calls)

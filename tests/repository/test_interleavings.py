"""FORMAT.md, "Interleavings of several processes": each case, with real stores and two writers."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from diesel_fs.format.chunk import ChunkHeader, ExtentInfo
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import id_fields, stamp
from diesel_fs.format.entries import ChunkId, Kind
from diesel_fs.format.object_names import chunk_object
from diesel_fs.ingest.concurrent_writers import finish_put
from diesel_fs.ingest.options import PutReport
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.repository.validation import StaleChunk, batch_of

from ..datasets import content

UNIT = 65536


class Writer:
    def __init__(self, repository: LocalRepository, name: str = "ds") -> None:
        self.session: LocalWriteSession = repository.begin(name)
        self.builder = ChunkBuilder(self.session.identity, 1 << 20)

    def add(
        self, path: bytes, content: bytes, part: ExtentInfo | None = None, size: int = -1
    ) -> None:
        self.builder.room(len(content))[: len(content)] = content
        whole = len(content) if size < 0 else size
        self.builder.add_file((b"", path), 0o644, 1, whole, part)

    def seal(self, chunk: ChunkId | None = None) -> "Sealed":
        made = chunk or self.session.new_id(self.builder.first_chunk_id)
        parts, header = self.builder.seal(made)
        self.session.objects.put(chunk_object(self.session.identity, made), parts)
        sealed = Sealed(self.session, made, [bytes(part) for part in parts], header)
        self.builder.clear()
        return sealed


class Sealed:
    def __init__(
        self,
        session: LocalWriteSession,
        chunk: ChunkId,
        parts: Sequence[bytes],
        header: ChunkHeader,
    ) -> None:
        self.session, self.id, self.parts, self.header = session, chunk, parts, header

    def commit(self) -> None:
        self.session.commit(self.parts[0], self.parts[1])


def fold_in(repository: LocalRepository, chunk: ChunkId) -> None:
    """Commit a durable chunk as it is, as a writer does that finds it in the store."""
    identity = repository.dataset("ds").identity
    header = repository.read_header(identity, chunk)
    repository.commit_batches(identity, batch_of(header, stored=True))


def rebuilt_equals_live(repository: LocalRepository) -> None:
    before = repository.view("ds")
    live = [(before.path(i), before.stat(i), before.extents(i)) for i in range(len(before))]
    assert repository.verify("ds").problems == []
    repository.recover("ds")
    after = repository.view("ds")
    assert [(after.path(i), after.stat(i), after.extents(i)) for i in range(len(after))] == live


def halves(fill: bytes) -> tuple[tuple[bytes, ExtentInfo], tuple[bytes, ExtentInfo]]:
    return ((fill * UNIT, ExtentInfo(0, 2, 0, UNIT)), (fill * 10, ExtentInfo(1, 2, UNIT, 10)))


def test_Z4_two_writers_of_one_large_file(repository: LocalRepository) -> None:
    first = Writer(repository)
    first.add(b"f", b"the version before")
    first.seal().commit()
    writers = {fill: Writer(repository) for fill in (b"A", b"B")}
    stamps = {}
    for fill, writer in writers.items():
        data, part = halves(fill)[0]
        writer.add(b"f", data, part, UNIT + 10)
        sealed = writer.seal()
        sealed.commit()
        stamps[fill] = stamp(sealed.id, 0)
    assert content(repository, b"f") == b"the version before"
    data, part = halves(b"B")[1]
    writers[b"B"].add(b"f", data, part, UNIT + 10)
    writers[b"B"].builder.set_stamp(stamps[b"B"])
    writers[b"B"].seal().commit()  # A has crashed
    assert content(repository, b"f") == b"B" * (UNIT + 10)
    rebuilt_equals_live(repository)
    assert content(repository, b"f") == b"B" * (UNIT + 10)


def test_Z5_an_open_chunk_and_anothers_acknowledged_put(repository: LocalRepository) -> None:
    a, b = Writer(repository), Writer(repository)
    a.add(b"x", b"A, early")
    b.add(b"x", b"B")
    b.seal().commit()
    a.add(b"x", b"A, late")
    a.seal().commit()
    assert content(repository, b"x") == b"A, late"
    rebuilt_equals_live(repository)


def test_Z6_purge_moves_an_entry(repository: LocalRepository) -> None:
    writer = Writer(repository)
    writer.add(b"keep", b"content")
    writer.add(b"gone", b"other")
    old = writer.seal()
    old.commit()
    writer.add(b"keep", b"content")
    writer.builder.set_stamp(stamp(old.id, 0))
    moved = writer.seal()
    time_of_moved = id_fields(moved.id).seconds
    repository.recover("ds", since_s=time_of_moved)
    view = repository.view("ds")
    (extent,) = view.extents(view.lookup(b"keep"))
    assert view.chunk_ids[extent.chunk] == moved.id
    assert content(repository, b"gone") == b"other"
    fold_in(repository, old.id)
    assert content(repository, b"keep") == b"content"
    rebuilt_equals_live(repository)


@pytest.mark.parametrize("late", [True, False])
def test_Z7_a_put_in_flight_and_a_delete(repository: LocalRepository, late: bool) -> None:
    writer, other = Writer(repository), Writer(repository)
    writer.add(b"f", b"in flight")
    if late:
        sealed = writer.seal()
        other.session.delete([b"f"])
    else:
        other.session.delete([b"f"])
        sealed = writer.seal()
    sealed.commit()
    assert content(repository, b"f") == (None if late else b"in flight")
    rebuilt_equals_live(repository)


def test_Z7_a_commit_after_the_put_window_is_refused(repository: LocalRepository) -> None:
    writer = Writer(repository)
    writer.add(b"f", b"too late")
    old = replace(id_fields(writer.session.new_id()), seconds=int(time.time()) - 3700)
    sealed = writer.seal(old.id())
    with pytest.raises(StaleChunk) as refused:
        sealed.commit()
    assert refused.value.paths == [b"f"]
    assert list(repository.chunk_ids(writer.session.identity)) == []


def test_Z4_file_in_two_writers_and_a_folder_of_its_name(repository: LocalRepository) -> None:
    a, b = Writer(repository), Writer(repository)
    a.add(b"p", b"a file")
    a.seal().commit()
    b.builder.room(1)[:1] = b"x"
    b.builder.add_file((b"p", b"inside"), 0o644, 1, 1)
    b.seal().commit()
    view = repository.view("ds")
    assert view.stat(view.lookup(b"p")).kind == Kind.FOLDER
    assert content(repository, b"p/inside") == b"x"
    assert any("p is a file and a folder" in text for text in repository.verify("ds").notes)


def folder_of(writer: Writer, inside: bool) -> None:
    writer.builder.add_folder((b"", b"p"), 0o750, 1)
    if inside:
        writer.builder.room(1)[:1] = b"x"
        writer.builder.add_file((b"p", b"inside"), 0o644, 1, 1)


def large_file_of(writer: Writer, content: bytes) -> list["Sealed"]:
    sealed: list[Sealed] = []
    for number, start in enumerate(range(0, len(content), UNIT)):
        some = content[start : start + UNIT]
        part = ExtentInfo(number, -(-len(content) // UNIT), start, len(some))
        writer.add(b"p", some, part, len(content))
        if sealed:
            writer.builder.set_stamp(sealed[0].header.stamp(0))
        sealed.append(writer.seal())
    return sealed


@pytest.mark.parametrize("kind", ["file", "large file", "link"])
@pytest.mark.parametrize("order", ["sealed last", "committed last", "finished last"])
def test_Z4_a_file_of_one_writer_and_a_folder_of_another(
    repository: LocalRepository, kind: str, order: str
) -> None:
    """Whichever comes first, the file is kept beside the folder; the last to finish sees to it."""
    a, b = Writer(repository), Writer(repository)
    assert a.session.view.version == b.session.view.version
    text = b"a file" if kind == "file" else bytes(range(256)) * 600
    folder_of(b, inside=True)
    early = b.seal() if order == "finished last" else None
    sealed: list[Sealed] = []
    if kind == "link":
        a.builder.add_link((b"", b"p"), 5, b"target")
        sealed.append(a.seal())
    elif kind == "file":
        a.add(b"p", text)
        sealed.append(a.seal())
    else:
        sealed += large_file_of(a, text)
    late = early or b.seal()
    reports = {a: PutReport(), b: PutReport()}
    if order == "committed last":  # the file's stamp is the smaller, and it never shows
        late.commit()
        finish_put(repository, b.session, reports[b])
    for each in sealed:
        each.commit()
    finish_put(repository, a.session, reports[a])
    if order != "committed last":
        late.commit()
        finish_put(repository, b.session, reports[b])
    view = repository.view("ds")
    assert view.stat(view.lookup(b"p")).kind == Kind.FOLDER
    assert content(repository, b"p/inside") == b"x"
    assert any("p is a file and a folder" in text for text in repository.verify("ds").notes)
    named = [path for report in reports.values() for path, _ in report.failed]
    assert named == ([] if order == "finished last" else [b"p"])
    repository.begin("ds").delete([b"p/inside"])
    view = repository.view("ds")
    index = view.lookup(b"p")
    if kind == "link":
        assert (view.link(index), view.stat(index).mtime_ns) == (b"target", 5)
    else:
        assert content(repository, b"p") == text
    rebuilt_equals_live(repository)


@pytest.mark.parametrize("how", ["deleted", "not ours"])
def test_Z4_a_file_replaced_on_purpose_is_gone(repository: LocalRepository, how: str) -> None:
    a, b, looker = Writer(repository), Writer(repository), Writer(repository)
    for writer in (a, b, looker):
        assert writer.session.view.entry_count == 1
    a.add(b"p", b"a file")
    a.seal().commit()
    writer = b if how == "deleted" else looker
    if how == "deleted":
        a.session.delete([b"p"])
    folder_of(b, inside=True)
    b.seal().commit()
    looker.add(b"else", b"1")
    looker.seal().commit()
    report = PutReport()
    finish_put(repository, writer.session, report)
    assert report.failed == []
    assert repository.verify("ds").notes == []

"""A rebuild while others commit: their chunks are in the new state, and they need not wait."""

import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, CorruptError, NoSuchDataset
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata import rebuild
from diesel_fs.storage.metadata.sqlite import shadow_state
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import CommitBatch, MetadataStore, RenewingCommitLock
from tests.storage.metadata.batches import Chunk, check, chunk_id, files, stored_entries, tombstones
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, Opener, commit, edit
from tests.waiting import wait_until

ONE_S = 10**9


class Chunks:
    def __init__(self, *chunks: Chunk) -> None:
        self.there = [*chunks]
        self.requested: list[Sequence[ChunkId]] = []

    def committed(self, meta: MetadataStore, *chunks: Chunk) -> None:
        """Add chunks as a writer does: first to the object store, then by a commit."""
        self.there += chunks
        commit(meta, *chunks)

    def listed(self, *, then: Callable[[], object] = lambda: None) -> Iterator[CommitBatch]:
        """All chunks that exist when the first batch is requested; `then` is called after that."""
        found = [chunk.batch() for chunk in self.there]
        then()
        yield from found

    def read_committed(self, chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        self.requested.append([*chunks])
        wanted = {chunk.id: chunk for chunk in self.there}
        yield from (wanted[chunk].batch() for chunk in chunks)

    def rebuild(self, meta: MetadataStore, then: Callable[[], object] = lambda: None) -> int:
        """Rebuild the dataset from these chunks; `then` is called meanwhile."""
        return meta.rebuild(NAME, IDENTITY, self.listed(then=then), self.read_committed)


def with_chunks(meta: MetadataStore, *chunks: Chunk) -> Chunks:
    commit(meta, *chunks)
    return Chunks(*chunks)


def commits_are_locked(opened: Opener) -> bool:
    with closing(opened(deadline_s=0.5)) as hasty:
        try:
            hasty.commit(IDENTITY, files(999, b"hasty").batch())
        except BusyError:
            return True
    return False


@pytest.mark.parametrize("before", [0, 1])
def test_C18_a_rebuild_has_new_commits(meta: MetadataStore, open_meta: Opener, before: int) -> None:
    store = Chunks(files(1, b"a", b"d/b"), files(2, b"c"))
    for chunk in store.there[: before + 1]:
        commit(meta, chunk)

    with closing(open_meta()) as writer:

        def put() -> None:
            more = files(3, b"d/b", b"new"), tombstones(4, b"c"), files(5, b"d/e/f")
            store.committed(writer, *more)

        version = store.rebuild(meta, put)
        check(meta, NAME, store.there)
        assert writer.head(NAME).version == version
        store.committed(writer, files(6, b"a"))
        check(meta, NAME, store.there)
    assert store.requested == [[chunk_id(number) for number in (3, 4, 5)]]


def test_C18_commits_do_not_wait_for_a_long_rebuild(
    meta: MetadataStore, open_meta: Opener, pool: ThreadPoolExecutor
) -> None:
    """The rebuild takes its next batch only after further commits."""
    store = with_chunks(meta, *(files(number, b"f%d" % number) for number in range(1, 9)))
    stop = threading.Event()
    commits = 0

    def put() -> None:
        nonlocal commits
        with closing(open_meta()) as writer:
            while not stop.is_set():
                number = len(store.there) + 100
                store.committed(writer, files(number, b"n%d" % number))
                commits += 1
                time.sleep(0.01)

    def wait_for_commits(wanted: int) -> None:
        wait_until(lambda: commits >= wanted)

    def slowly(batches: Iterable[CommitBatch]) -> Iterator[CommitBatch]:
        for batch in batches:
            yield batch
            wait_for_commits(commits + 3)

    putting = pool.submit(put)
    try:
        meta.rebuild(NAME, IDENTITY, slowly(store.listed()), store.read_committed)
    finally:
        stop.set()
    putting.result(30)
    check(meta, NAME, store.there)


def test_C18_commits_are_locked_for_the_last_few_chunks_only(
    meta: MetadataStore, open_meta: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "LOCKED_CHUNKS_MAX", 3)
    store = with_chunks(meta, files(1, b"a"))
    was_locked = list[bool]()

    def put() -> None:
        store.committed(meta, *(files(number, b"f%d" % number) for number in range(10, 20)))

    def read_committed(chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        if not store.requested:
            store.committed(meta, files(30, b"more"), files(31, b"even more"))
            was_locked.append(False)
        else:
            was_locked.append(commits_are_locked(open_meta))
        yield from store.read_committed(chunks)

    meta.rebuild(NAME, IDENTITY, store.listed(then=put), read_committed)
    assert [len(chunks) for chunks in store.requested] == [10, 2]
    assert was_locked == [False, True]
    assert not commits_are_locked(open_meta)
    check(meta, NAME, [*store.there, files(999, b"hasty")])


def test_C18_a_rebuild_without_read_committed_fails_at_a_commit(meta: MetadataStore) -> None:
    store = with_chunks(meta, files(1, b"a"))
    batches = store.listed(then=lambda: store.committed(meta, files(2, b"b")))
    with pytest.raises(BusyError, match="was changed"):
        meta.rebuild(NAME, IDENTITY, batches)
    check(meta, NAME, store.there)


@pytest.mark.parametrize("error", [CorruptError("a chunk is damaged"), KeyboardInterrupt()])
def test_C18_late_chunks_that_cannot_be_read_leave_the_old_state(
    meta: MetadataStore, open_meta: Opener, error: BaseException
) -> None:
    store = with_chunks(meta, files(1, b"a"))
    batches = store.listed(then=lambda: store.committed(meta, files(2, b"b")))

    def read_committed(chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        yield from store.read_committed(chunks)
        raise error

    with pytest.raises(type(error)):
        meta.rebuild(NAME, IDENTITY, batches, read_committed)
    check(meta, NAME, store.there)
    assert not commits_are_locked(open_meta)


def test_late_chunks_without_a_batch_are_requested_once(
    meta: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "LOCKED_CHUNKS_MAX", 0)
    store = with_chunks(meta, files(1, b"a"))
    batches = store.listed(then=lambda: commit(meta, files(2, b"damaged")))
    calls = list[Collection[ChunkId]]()

    def read_committed(chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        calls.append(chunks)
        yield from ()

    meta.rebuild(NAME, IDENTITY, batches, read_committed)
    assert calls == [[chunk_id(2)]]
    check(meta, NAME, store.there)


def test_chunks_committed_before_a_rebuild_are_not_requested(meta: MetadataStore) -> None:
    """A rebuild leaves out chunks that were committed before, if their objects are lost."""
    store = Chunks(files(1, b"a"), files(3, b"orphan"))
    commit(meta, files(1, b"a"), files(2, b"lost"))
    store.rebuild(meta)
    assert store.requested == []
    check(meta, NAME, store.there)


def test_a_rebuilt_state_is_newer_than_the_last_commit(meta: MetadataStore) -> None:
    store = Chunks(files(1, b"a"), files(2, b"orphan"))
    commit(meta, files(1, b"a"))
    last = list[int]()

    def batches() -> Iterator[CommitBatch]:
        yield from store.listed()
        store.committed(meta, files(3, b"b"))
        last.append(meta.head(NAME).version)

    meta.rebuild(NAME, IDENTITY, batches(), store.read_committed)
    assert set(stored_entries(meta.changes(IDENTITY, last[0]).rows)) == {b"a", b"orphan", b"b"}


def test_a_dataset_dropped_during_a_rebuild_stays_dropped(meta: MetadataStore) -> None:
    store = with_chunks(meta, files(1, b"a"))
    with pytest.raises(NoSuchDataset):
        store.rebuild(meta, lambda: meta.drop(IDENTITY))
    assert meta.heads() == []
    meta.create(NAME, IDENTITY)
    check(meta, NAME, [])


def test_two_rebuilds_at_once_lose_nothing(meta: MetadataStore, open_meta: Opener) -> None:
    """Even if the store did not know the dataset, and the other rebuild has made it."""
    store = Chunks(files(1, b"a"), files(2, b"b"))
    meta.drop(IDENTITY)
    with closing(open_meta()) as other:

        def meanwhile() -> None:
            store.rebuild(other)
            number = len(store.there) + 1
            store.committed(other, files(number, b"f%d" % number))
            store.rebuild(other)

        for _ in range(2):
            store.rebuild(meta, meanwhile)
            check(other, NAME, store.there)


def test_chunks_forgotten_during_a_rebuild_can_be_forgotten_again(meta: MetadataStore) -> None:
    store = with_chunks(meta, files(1, b"a"), files(2, b"a"), files(3, b"z"))
    gone = chunk_id(1)
    store.rebuild(meta, lambda: meta.forget(IDENTITY, [gone]))
    meta.forget(IDENTITY, [gone])
    check(meta, NAME, store.there[1:])


def test_C2_a_rebuild_interrupted_after_its_end_has_succeeded(
    meta: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Chunks(files(1, b"a"), files(2, b"orphan"))
    commit(meta, files(1, b"a"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RenewingCommitLock, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            meta.rebuild(NAME, IDENTITY, store.listed())
    check(meta, NAME, store.there)


@pytest.fixture
def embedded(path: Path) -> Iterator[SqliteMetadata]:
    with closing(SqliteMetadata.open(path, create=True)) as store:
        store.create(NAME, IDENTITY)
        yield store


def rows_of_no_dataset(path: Path) -> int:
    owners = {
        "dataset": ("folder", "chunk", "aside", "hold"),
        "folder": ("entry", "run", "part"),
        "chunk": ("hole", "span"),
    }
    with closing(sqlite3.connect(path)) as db:
        return sum(
            db.execute(
                f"SELECT count(*) FROM {table} WHERE {owner} NOT IN (SELECT number FROM {owner})"  # noqa: S608
            ).fetchone()[0]
            for owner, tables in owners.items()
            for table in tables
        )


def many() -> list[Chunk]:
    paths = [b"d%d/%03d" % (i % 5, i) for i in range(200)]
    return [files(1, *paths), files(2, *paths[::3]), files(3, b"x"), tombstones(4, b"x")]


@pytest.mark.parametrize("ends_by", ["success", "error", "drop"])
def test_no_rows_of_a_shadow_state_are_left(
    embedded: SqliteMetadata, path: Path, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ROWS_AT_ONCE", "_FOLDERS_AT_ONCE", "_CHUNKS_AT_ONCE"):
        monkeypatch.setattr(shadow_state, name, 3)
    store = with_chunks(embedded, *many())

    def batches() -> Iterator[CommitBatch]:
        yield from store.listed()
        assert rows_of_no_dataset(path) > 0
        if ends_by == "error":
            raise CorruptError("a chunk is damaged")

    if ends_by == "drop":
        embedded.drop(IDENTITY)
        embedded.create(NAME, IDENTITY)
        store.there.clear()
    elif ends_by == "error":
        with pytest.raises(CorruptError):
            embedded.rebuild(NAME, IDENTITY, batches())
    else:
        embedded.rebuild(NAME, IDENTITY, batches())
    assert rows_of_no_dataset(path) == 0
    check(embedded, NAME, store.there)


def test_rows_of_a_killed_rebuild_are_removed_by_a_later_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [1_800_000_000 * ONE_S]
    opened = SqliteMetadata.open(path, create=True, clock_ns=lambda: now_ns[0])
    with closing(opened) as meta:
        meta.create(NAME, IDENTITY)
        store = Chunks(*many())
        commit(meta, *store.there)

        monkeypatch.setattr(shadow_state, "_ROWS_AT_ONCE", 1)

        def beside(seconds: int) -> None:
            meta.create("other", uuid.UUID(int=9))
            now_ns[0] += seconds * ONE_S
            meta.rebuild("other", uuid.UUID(int=9), [files(1, b"a").batch()])

        def batches(seconds: int) -> Iterator[CommitBatch]:
            yield from store.listed()
            beside(seconds)

        def killed() -> Iterator[CommitBatch]:
            yield from store.listed()
            raise KeyboardInterrupt

        meta.rebuild(NAME, IDENTITY, batches(500))
        with pytest.raises(BusyError, match="took this rebuild for dead"):
            meta.rebuild(NAME, IDENTITY, batches(700))
        check(meta, NAME, store.there)
        assert rows_of_no_dataset(path) == 0
        monkeypatch.setattr(shadow_state.SqliteShadowState, "discard", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            meta.rebuild(NAME, IDENTITY, killed())
        assert rows_of_no_dataset(path) > 0
        beside(0)
        assert rows_of_no_dataset(path) > 0, "it may be at work still"
        beside(700)
        assert rows_of_no_dataset(path) == 0
        check(meta, NAME, store.there)


def test_a_rebuild_that_is_being_removed_fails(embedded: SqliteMetadata, path: Path) -> None:
    store = with_chunks(embedded, *many())

    removed_by_another = partial(edit, path, "UPDATE aside SET beat = 0")
    with pytest.raises(BusyError, match="took this rebuild for dead"):
        embedded.rebuild(NAME, IDENTITY, store.listed(then=removed_by_another))
    check(embedded, NAME, store.there)


def test_a_rebuild_without_lock_includes_late_commits(embedded: SqliteMetadata, path: Path) -> None:
    store = with_chunks(embedded, files(1, b"a"))

    def read_committed(chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        edit(path, "DELETE FROM hold")
        if len(store.there) == 2:
            store.committed(embedded, files(3, b"c"))
        yield from store.read_committed(chunks)

    batches = store.listed(then=lambda: store.committed(embedded, files(2, b"b")))
    embedded.rebuild(NAME, IDENTITY, batches, read_committed)
    assert store.requested == [[chunk_id(2)], [chunk_id(3)]]
    check(embedded, NAME, store.there)


def test_a_lock_outlasts_a_rebuild(embedded: SqliteMetadata, path: Path) -> None:
    store = with_chunks(embedded, files(1, b"a"))
    with closing(SqliteMetadata.open(path, deadline_s=0.05)) as hasty:
        with embedded.lock_commits(IDENTITY, 60):
            embedded.rebuild(NAME, IDENTITY, store.listed())
            with pytest.raises(BusyError):
                hasty.commit(IDENTITY, files(2, b"b").batch())
        hasty.commit(IDENTITY, files(2, b"b").batch())


def test_a_store_without_the_table_aside_is_rebuilt(embedded: SqliteMetadata, path: Path) -> None:
    edit(path, "DROP TABLE IF EXISTS aside")
    store = with_chunks(embedded, *many())
    embedded.rebuild(NAME, IDENTITY, store.listed())
    check(embedded, NAME, store.there)
    embedded.drop(IDENTITY)
    assert rows_of_no_dataset(path) == 0

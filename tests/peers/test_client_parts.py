"""`TaskStore.read_parts`: requests ahead, and parts that are not of a chunk."""

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache import reader as store_module
from diesel_fs.cache.reader import EntryReader
from diesel_fs.errors import DieselError
from diesel_fs.format.object_names import STORE_MARKER, chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.net import breaker
from diesel_fs.peers import wire
from diesel_fs.peers.client import TaskStore
from diesel_fs.repository.local import LocalRepository
from tests.peers.conftest import DEADLINE_S, FILES, Counting
from tests.peers.fake_master import HELLO, READ, FakeMaster


def test_other_objects_come_from_the_store(
    store: TaskStore,
    master: FakeMaster,
    inner: Counting,
    view: Snapshot,
    chunks: dict[int, bytes],
) -> None:
    marker = bytes(inner.get(STORE_MARKER))
    first, second = (chunk_object(view.identity, view.chunk_ids[at]) for at in (0, 1))
    wanted = [(first, 3, 10), (STORE_MARKER, 1, 9), (second, 0, 20), (STORE_MARKER, 0, 1)]
    found = list(map(bytes, store.read_parts(wanted)))
    assert found == [chunks[0][3:13], marker[1:10], chunks[1][:20], marker[:1]]
    assert master.kinds().count(READ) == 1


def test_a_version_without_chunks_has_none_to_ask_for(
    repository: LocalRepository, inner: Counting, path: Path
) -> None:
    repository.begin("empty")
    store = TaskStore(inner, path, repository.view("empty"))
    assert list(map(bytes, store.read_parts([(STORE_MARKER, 0, 4)]))) == [
        bytes(inner.get(STORE_MARKER))[:4]
    ]
    store.close()


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize(("start", "size"), [(-1, 5), (1 << 40, 5), (1, 0)])
def test_a_part_outside_its_chunk_is_an_error_of_the_store(
    store: TaskStore, view: Snapshot, start: int, size: int
) -> None:
    """The last case is one byte more than the chunk has."""
    name, size = chunk_object(view.identity, view.chunk_ids[0]), size or int(view.chunk_sizes[0])
    with pytest.raises(DieselError):
        list(store.read_parts([(name, 0, 5), (name, start, size)]))


# What is under way --------------------------------------------------------------------------------


def some_parts(view: Snapshot, seed: int) -> list[tuple[str, int, int]]:
    draw = np.random.default_rng(seed)
    chunks = draw.integers(0, view.chunk_count, 20).tolist()
    starts = draw.integers(0, 500, 20).tolist()
    names = [chunk_object(view.identity, view.chunk_ids[chunk]) for chunk in chunks]
    return [(name, start, 100) for name, start in zip(names, starts, strict=True)]


def check(store: TaskStore, inner: Counting, view: Snapshot, seed: int) -> None:
    parts = some_parts(view, seed)
    right = [bytes(inner.inner.get(*part)) for part in parts]
    assert list(map(bytes, store.read_parts(parts))) == right


def test_parts_are_requested_before_the_first_one_is_consumed(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot
) -> None:
    master.behaviour.pins = False
    parts = some_parts(view, 1)
    found = store.read_parts(parts)
    end_s = time.monotonic() + 10
    while READ not in master.kinds():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    check(store, inner, view, 2)  # on another connection
    assert list(map(bytes, found)) == [bytes(inner.inner.get(*part)) for part in parts]
    assert inner.reads == 0


def test_the_next_group_of_parts_is_requested_ahead(
    store: TaskStore,
    master: FakeMaster,
    view: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "BATCH_PARTS_MAX", 5)
    master.behaviour.pins = False
    files = view.files()
    stored = view.columns.stored[files]
    files = files[(stored > 0) & (stored * 20 < view.chunk_sizes[view.chunk_of(files)])]
    _, first_of, count = np.unique(view.chunk_of(files), return_index=True, return_counts=True)
    alone = files[np.concatenate([first_of, first_of + count - 1])]  # too few to read chunks whole
    assert len(alone) > 10
    reader = EntryReader(view, store, 400_000)
    found = reader.read_many(alone)
    first = next(found)
    end_s = time.monotonic() + 10
    while master.kinds().count(READ) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(0.05)
    assert master.kinds().count(READ) == 2, "one, and not more"
    names = [os.fsdecode(view.path(index)) for index in alone.tolist()]
    assert [bytes(first), *map(bytes, found)] == [FILES[name] for name in names]


def test_abandoned_reads_keep_their_connections_and_mix_no_answers(
    store: TaskStore,
    master: FakeMaster,
    inner: Counting,
    view: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "TIMEOUT_MIN_S", 1.0)  # a busy machine is no late master
    master.behaviour.pins = False
    for seed in range(30):
        found = store.read_parts(some_parts(view, seed))
        if seed % 3:
            next(found, None)
        del found
        gc.collect()
        if seed % 4 == 0:
            check(store, inner, view, 100 + seed)
    check(store, inner, view, 99)
    assert inner.reads == 0
    assert master.kinds().count(HELLO) <= 2
    assert store.stats()["answers"]


def test_F2_a_master_that_hangs_in_an_abandoned_read(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot
) -> None:
    check(store, inner, view, 1)
    master.behaviour.hangs = 5.0
    dropped = [store.read_parts(some_parts(view, seed)) for seed in range(6)]
    del dropped
    gc.collect()
    start_s = time.monotonic()
    check(store, inner, view, 7)
    assert time.monotonic() - start_s < 2 * DEADLINE_S
    for seed in range(8, 12):
        check(store, inner, view, seed)
    own = store._chunks._own_link(wire.LOAD)
    assert own.counts["skipped"], "it is not asked again at once"


def test_a_forked_child_receives_no_answers_of_its_parent(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot
) -> None:
    master.behaviour.pins = False
    parts = some_parts(view, 1)
    right = [bytes(inner.inner.get(*part)) for part in parts]
    both, dropped = store.read_parts(parts), store.read_parts(parts)
    child = os.fork()
    if not child:
        code = 1
        try:
            del dropped
            gc.collect()
            assert list(map(bytes, both)) == right
            reads = inner.reads
            check(store, inner, view, 3)
            assert inner.reads == reads, "from the master"
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(map(bytes, both)) == list(map(bytes, dropped)) == right
    assert inner.reads == 0

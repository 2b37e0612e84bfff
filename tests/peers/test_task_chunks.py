"""Where a reader's parts come from: mapped chunks, the owners, the node's own master, the store."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.peers import task_chunks, wire
from diesel_fs.peers.client import TaskStore

from ..server.program import until
from .conftest import DEADLINE_S, PAUSE_S, Counting
from .fake_master import PIN, RANK, READ, SECRET, TASK, FakeMaster
from .fake_owner import FakeOwner

OTHER = 5


@pytest.fixture
def owner(view: Snapshot, chunks: dict[int, bytes], master: FakeMaster) -> Iterator[FakeOwner]:
    """Another node, which owns all chunks."""
    with FakeOwner(
        OTHER, chunks, identity=view.identity, version=view.version, task=TASK, secret=SECRET
    ) as made:
        master.set_owners(dict.fromkeys(chunks, OTHER), made)
        yield made


def counts(store: TaskStore) -> dict[str, int]:
    return cast("dict[str, int]", store.stats()["client"])


def read(store: TaskStore, view: Snapshot, chunks: dict[int, bytes], *wanted: int) -> None:
    """Read a part of each of these chunks, in one request, and check it."""
    names = [chunk_object(view.identity, view.chunk_ids[chunk]) for chunk in wanted]
    found = list(map(bytes, store.read_parts([(name, 500, 100) for name in names])))
    assert found == [chunks[chunk][500:600] for chunk in wanted]


def read_one(store: TaskStore, view: Snapshot, chunks: dict[int, bytes], chunk: int) -> None:
    room = bytearray(100)
    store.read_into(chunk_object(view.identity, view.chunk_ids[chunk]), 500, room)
    assert room == chunks[chunk][500:600]


def test_another_node_is_asked_directly_and_nothing_of_it_is_mapped(
    store: TaskStore, master: FakeMaster, owner: FakeOwner, inner: Counting, view: Snapshot,
    chunks: dict[int, bytes],
) -> None:  # fmt: skip
    for _ in range(20):
        read(store, view, chunks, 0, 1)
        read_one(store, view, chunks, 1)
    assert inner.reads == 0
    assert READ not in master.kinds()
    assert PIN not in master.kinds()
    [hello] = owner.hellos
    assert (hello.rank, hello.is_client, hello.to) == (RANK, True, OTHER)
    assert {flags for flags, _ in owner.reads} == {wire.LOAD}
    told = counts(store)
    assert (told["peer_reads"], told["local_reads"], told["store_reads"]) == (60, 0, 0)


def test_parts_of_all_sources_come_in_their_order(
    store: TaskStore, master: FakeMaster, owner: FakeOwner, inner: Counting, view: Snapshot,
    chunks: dict[int, bytes],
) -> None:  # fmt: skip
    master.set_owners({0: RANK, 1: RANK, 2: OTHER, 3: 9}, owner)
    mapped = store.pin(chunk_object(view.identity, view.chunk_ids[0]), lambda: None)
    assert mapped is not None
    read(store, view, chunks, 3, 2, 1, 0, 2, 3, 0, 1)
    told = counts(store)
    names = ("mapped_reads", "local_reads", "peer_reads", "store_reads")
    assert [told[name] for name in names] == [2, 2, 2, 2]
    assert inner.reads == 2


def test_a_chunk_that_is_given_up_between_request_and_read_is_read_elsewhere(
    store: TaskStore, master: FakeMaster, owner: FakeOwner, view: Snapshot,
    chunks: dict[int, bytes],
) -> None:  # fmt: skip
    master.set_owners({0: RANK, 1: RANK, 2: OTHER}, owner)
    for chunk in (0, 1):
        name = chunk_object(view.identity, view.chunk_ids[chunk])
        assert store.pin(name, lambda: None) is not None
    reader = store.chunk_reader(view.identity, view.version)
    assert reader is not None
    arriving = reader.begin(np.array([(2, 500, 9), (0, 7, 8), (1, 1, 5), (0, 3, 4)], np.uint32))
    store._mapped.release([0])
    found: dict[int, bytes] = {}
    for group in arriving:
        found.update(zip(group.places, map(bytes, group.contents), strict=True))
    right = (chunks[2][500:509], chunks[0][7:15], chunks[1][1:6], chunks[0][3:7])
    assert found == dict(enumerate(right))


def test_a_chunk_of_this_node_is_mapped_when_its_reads_have_cost_as_much(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    each_s = task_chunks.READ_COST_S + task_chunks.PART_S
    before = int(task_chunks.PIN_COST_S // each_s) + 1
    for _ in range(before):
        read_one(store, view, chunks, 1)
    assert not master.pinned
    read_one(store, view, chunks, 1)
    assert master.pinned == [1]
    read_one(store, view, chunks, 1)
    assert master.kinds().count(READ) == before
    assert counts(store)["mapped_reads"] == 2


@pytest.mark.usefixtures("owner")
def test_owners_change_and_other_nodes_are_asked(
    store: TaskStore, master: FakeMaster, owner: FakeOwner, view: Snapshot,
    chunks: dict[int, bytes], inner: Counting,
) -> None:  # fmt: skip
    read(store, view, chunks, 0, 1)
    with FakeOwner(
        6, chunks, identity=view.identity, version=view.version, task=TASK, secret=SECRET
    ) as other:
        master.set_owners(dict.fromkeys(chunks, 6), other)
        read(store, view, chunks, 0, 1)
        assert (len(owner.reads), len(other.reads)) == (1, 1)
        master.set_owners({0: OTHER}, owner, other)
        read(store, view, chunks, 0)
        assert (len(owner.reads), len(other.reads)) == (2, 1)
    assert inner.reads == 0


def test_a_node_that_refuses_is_asked_through_the_own_master(
    store: TaskStore, master: FakeMaster, owner: FakeOwner, view: Snapshot,
    chunks: dict[int, bytes], inner: Counting,
) -> None:  # fmt: skip
    owner.behaviour.refuses = "too many connections"
    read(store, view, chunks, 0)
    assert inner.reads <= 1, "the attempt itself"
    inner.reads = 0
    read(store, view, chunks, 1)
    read_one(store, view, chunks, 1)
    assert inner.reads == 0
    assert master.flags == [wire.LOAD | wire.THROUGH] * 2


def test_a_node_that_has_gone_costs_no_reader_a_read(
    store: TaskStore, owner: FakeOwner, view: Snapshot, chunks: dict[int, bytes], inner: Counting
) -> None:
    read(store, view, chunks, 0)
    owner.__exit__(None, None, None)
    for _ in range(5):
        read(store, view, chunks, 1)
        read_one(store, view, chunks, 0)
    assert inner.reads == counts(store)["store_reads"] == 10


def test_a_connection_that_was_closed_is_made_again(
    store: TaskStore, owner: FakeOwner, view: Snapshot, chunks: dict[int, bytes], inner: Counting
) -> None:
    read(store, view, chunks, 0)
    owner.disconnect()
    read(store, view, chunks, 1)
    until(lambda: len(owner.hellos) == 2, "another connection")
    assert inner.reads == 0


def test_with_through_master_only_the_own_master_is_asked(
    inner: Counting, master: FakeMaster, owner: FakeOwner, view: Snapshot, path: Path,
    chunks: dict[int, bytes],
) -> None:  # fmt: skip
    store = TaskStore(inner, path, view, deadline_s=DEADLINE_S, pause_s=PAUSE_S)
    store._chunks._through_master = True
    master.behaviour.pins = False
    try:
        read(store, view, chunks, 0, 1)
        read_one(store, view, chunks, 2)
        master.set_owners({0: RANK}, owner)
        read(store, view, chunks, 0)
    finally:
        store.close()
    assert inner.reads == 0
    assert owner.hellos == []
    assert master.flags == [wire.LOAD | wire.THROUGH] * 2 + [wire.LOAD]

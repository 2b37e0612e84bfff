"""The sources of a reader's parts: mapped chunks, the owners, the node's own master, the store."""

from collections.abc import Iterator

import numpy as np
import pytest

from diesel_fs.peers import wire
from diesel_fs.peers.reader import task_chunks
from tests.waiting import until

from ..conftest import Client
from ..fake_master import PIN, RANK, READ, SECRET, TASK, FakeMaster
from ..fake_owner import FakeOwner

OTHER = 5


def owner_of_all(client: Client, rank: int) -> FakeOwner:
    identity, version = client.view.identity, client.view.version
    return FakeOwner(
        rank, client.chunks, identity=identity, version=version, task=TASK, secret=SECRET
    )


@pytest.fixture
def owner(client: Client, master: FakeMaster) -> Iterator[FakeOwner]:
    with owner_of_all(client, OTHER) as made:
        master.set_owners(dict.fromkeys(client.chunks, OTHER), made)
        yield made


def test_requests_go_directly_to_another_node_and_nothing_of_it_is_mapped(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    for _ in range(20):
        client.read(0, 1)
        client.read_one(1)
    assert client.inner.reads == 0
    assert READ not in master.kinds()
    assert PIN not in master.kinds()
    [hello] = owner.hellos
    assert (hello.rank, hello.is_client, hello.to) == (RANK, True, OTHER)
    assert {flags for flags, _ in owner.reads} == {wire.LOAD}
    counts = client.counts()
    assert (counts["peer_reads"], counts["local_reads"], counts["store_reads"]) == (60, 0, 0)


def test_parts_of_all_sources_in_order(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    master.set_owners({0: RANK, 1: RANK, 2: OTHER, 3: 9}, owner)
    assert client.pin(0) is not None
    client.read(3, 2, 1, 0, 2, 3, 0, 1)
    counts = client.counts()
    names = ("mapped_reads", "local_reads", "peer_reads", "store_reads")
    assert [counts[name] for name in names] == [2, 2, 2, 2]
    assert client.inner.reads == 2


def test_a_chunk_that_is_unmapped_between_request_and_read_is_read_elsewhere(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    master.set_owners({0: RANK, 1: RANK, 2: OTHER}, owner)
    for chunk in (0, 1):
        assert client.pin(chunk) is not None
    reader = client.store.fast_reads.chunk_reader(client.view.identity, client.view.version)
    assert reader is not None
    parts = [(2, 500, 9), (0, 7, 8), (1, 1, 5), (0, 3, 4)]
    arriving = reader.begin(np.array(parts, np.uint32))
    client.store._mapped.release([0])
    found: dict[int, bytes] = {}
    for group in arriving:
        found.update(zip(group.places, map(bytes, group.contents), strict=True))
    right = [client.chunks[chunk][start : start + size] for chunk, start, size in parts]
    assert found == dict(enumerate(right))


def test_an_own_chunk_is_mapped_when_its_reads_have_cost_as_much(
    client: Client, master: FakeMaster
) -> None:
    each_s = task_chunks.READ_COST_S + task_chunks.PART_S
    before = int(task_chunks.PIN_COST_S // each_s) + 1
    for _ in range(before):
        client.read_one(1)
    assert not master.pinned
    for _ in range(2):
        client.read_one(1)
        assert master.pinned == [1]
    assert master.kinds().count(READ) == before
    assert client.counts()["mapped_reads"] == 2
    room = memoryview(bytearray(100))
    assert client.store.fast_reads.read_nowait(client.name(1), 7, room)
    assert room == client.chunks[1][7:107]
    [piece] = client.store.fast_reads.read_parts([(client.name(1), 9, 50)])
    assert piece.nbytes == 50
    assert len(piece.obj) == len(client.chunks[1]), "nothing was copied"  # type: ignore[arg-type]  # an array
    assert client.inner.reads == 0


def test_requests_follow_the_owners(client: Client, master: FakeMaster, owner: FakeOwner) -> None:
    client.read(0, 1)
    with owner_of_all(client, 6) as other:
        master.set_owners(dict.fromkeys(client.chunks, 6), other)
        client.read(0, 1)
        assert (len(owner.reads), len(other.reads)) == (1, 1)
        master.set_owners({0: OTHER}, owner, other)
        client.read(0)
        assert (len(owner.reads), len(other.reads)) == (2, 1)
    assert client.inner.reads == 0


def test_requests_to_a_node_that_refuses_go_through_the_own_master(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    owner.behaviour.refuses = "too many connections"
    client.read(0)
    assert client.inner.reads <= 1, "the attempt itself"
    client.inner.reads = 0
    client.read(1)
    client.read_one(1)
    assert client.inner.reads == 0
    assert master.flags == [wire.LOAD | wire.THROUGH] * 2


def test_a_closed_connection_and_a_nodes_end_cost_no_read(client: Client, owner: FakeOwner) -> None:
    client.read(0)
    owner.disconnect()
    client.read(1)
    until(lambda: len(owner.hellos) == 2, "another connection")
    assert client.inner.reads == 0
    owner.__exit__()
    for _ in range(5):
        client.read(1)
        client.read_one(0)
    assert client.inner.reads == client.counts()["store_reads"] == 10


def test_with_through_master_all_requests_go_to_the_own_master(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    client.store._chunks._through_master = True
    master.behaviour.pins = False
    client.read(0, 1)
    client.read_one(2)
    master.set_owners({0: RANK}, owner)
    client.read(0)
    assert client.inner.reads == 0
    assert owner.hellos == []
    assert master.flags == [wire.LOAD | wire.THROUGH] * 2 + [wire.LOAD]


def test_it_is_slow_while_a_slow_store_gives_parts_that_the_nodes_lack(
    client: Client, master: FakeMaster, owner: FakeOwner
) -> None:
    chunks = client.store._chunks
    assert chunks.is_slow, "nothing was read yet"
    for _ in range(40):
        client.read(0, 1)
    assert not chunks.is_slow, "the nodes have all"
    client.inner.delay_s = 0.02
    master.set_owners({0: OTHER, 1: 9}, owner)
    client.read(0, 1)
    assert chunks.is_slow
    client.inner.delay_s = 0.0
    for _ in range(80):
        client.read(0, 1)
    assert not chunks.is_slow, "the store is fast"

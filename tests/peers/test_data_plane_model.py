"""Random requests to a data plane over a connection, in random pieces, against a plain list of
bytes; requests and answers are packed and parsed here again, from the description in PEERS.md."""

import random
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.peers.chunk_table import ChunkTable
from tests.examples import examples

from .planes import HOPE_S, KINDS, exactly, running_plane

CHUNKS = [random.Random(number).randbytes(size) for number, size in enumerate((1, 700, 60_000))]
ABSENT_CHUNK = 1

Records = list[tuple[int, int, int]]


@st.composite
def record(draw: st.DrawFn) -> tuple[int, int, int]:
    chunk = draw(st.integers(0, len(CHUNKS) - 1))
    start = draw(st.integers(0, len(CHUNKS[chunk])))
    return chunk, start, draw(st.integers(0, len(CHUNKS[chunk]) - start))


@examples(60)
@given(
    st.lists(st.lists(record(), min_size=1, max_size=12), min_size=1, max_size=40),
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.sampled_from(KINDS),
    st.randoms(use_true_random=False),
)
def test_every_request_gets_its_own_bytes_once(
    requests: list[Records], pieces: list[int], kind: str, chance: random.Random
) -> None:
    with running_plane() as plane:
        plane.table = ChunkTable(np.array([len(each) for each in CHUNKS], np.uint64))
        for chunk, content in enumerate(CHUNKS):
            if chunk != ABSENT_CHUNK:
                plane.table.views[chunk] = memoryview(content)
        end = plane.connect_as(kind)
        stream = b"".join(
            struct.pack("<IBBHII", number, 1, 0, 0, len(records), 0)
            + b"".join(struct.pack("<III", *each) for each in records)
            for number, records in enumerate(requests)
        )
        at = turn = 0
        while at < len(stream):
            size = pieces[turn % len(pieces)] if turn < 100 else len(stream)
            end.sendall(stream[at : at + size])
            at, turn = at + size, turn + 1
        absent = [any(each[0] == ABSENT_CHUNK for each in records) for records in requests]
        waiting = [plane.forwarded.get(timeout=HOPE_S) for _ in range(sum(absent))]
        assert [each.id for each in waiting] == [i for i, each in enumerate(absent) if each]
        chance.shuffle(waiting)
        for each in waiting:
            records = [tuple(row) for row in each.parts.tolist()]
            assert records == requests[each.id]
            statuses = bytes(chunk == ABSENT_CHUNK for chunk, _, _ in records)
            plane.answer(each, statuses, wanted(requests[each.id], statuses))
        left = set(range(len(requests)))
        for _ in requests:
            number, kind, zero, none, count, size = struct.unpack("<IBBHII", exactly(end, 16))
            left.remove(number)
            assert (kind, zero, none, count) == (1, 0, 0, len(requests[number]))
            statuses = exactly(end, count)
            assert statuses == bytes(chunk == ABSENT_CHUNK for chunk, _, _ in requests[number])
            assert exactly(end, size) == wanted(requests[number], statuses)
        assert not left


def wanted(records: Records, statuses: bytes) -> bytes:
    """The bytes of the parts that are given."""
    return b"".join(
        CHUNKS[chunk][start : start + size]
        for (chunk, start, size), status in zip(records, statuses, strict=True)
        if not status
    )

"""What the data plane reads from memory and from lent files is counted apart."""

import numpy as np

from diesel_fs.peers.node.chunk_table import ChunkTable
from diesel_fs.peers.wire import PART


class InPageCache:
    """An open file whose bytes need no waiting."""

    def read_nowait(self, start: int, room: memoryview) -> bool:
        room[:] = bytes(len(room))
        return True


def test_bytes_from_memory_and_from_files_count_once() -> None:
    table = ChunkTable(np.full(3, 100, np.uint64))
    table.records_reads = True
    table.views[0] = table.views[1] = np.zeros(100, np.uint8).data
    table.lend(2, InPageCache())  # type: ignore[arg-type]  # a handle
    parts = [(0, 0, 10), (2, 5, 40), (1, 0, 20)]
    found, size = table.find(memoryview(b"".join(PART.pack(*each) for each in parts)))
    assert found is not None
    assert [each.nbytes for each in found] == [10, 40, 20]
    assert size == 70
    assert table.take_reads() == [([0, 1], 30)]
    assert table.take_file_reads() == [(2, 40)]

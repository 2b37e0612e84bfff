"""What the two threads of a master share of its chunks in memory."""

import threading

import numpy as np

from diesel_fs.peers.chunk_table import ChunkTable

SIZES = np.array([10, 20], np.uint64)


def test_of_very_many_reads_the_oldest_are_forgotten() -> None:
    table = ChunkTable(SIZES)
    table.records_reads = True
    for size in range(100_000):
        table.record_read((0,), size)
    sizes = [size for _, size in table.take_reads()]
    assert 0 < len(sizes) < 100_000
    assert sizes == list(range(100_000 - len(sizes), 100_000))


def test_no_read_is_lost_or_taken_twice_while_another_thread_records() -> None:
    table = ChunkTable(SIZES)
    table.records_reads = True
    taken: list[int] = []
    for begin in range(0, 100_000, 2000):  # fewer than are remembered

        def record(begin: int = begin) -> None:
            for size in range(begin, begin + 2000):
                table.record_read((0,), size)

        thread = threading.Thread(target=record)
        thread.start()
        while thread.is_alive():
            taken += [size for _, size in table.take_reads()]
        taken += [size for _, size in table.take_reads()]
    assert taken == list(range(100_000))

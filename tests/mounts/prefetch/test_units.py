"""`cut`: which files of an order are pushed together."""

import numpy as np

from diesel_fs.mounts.prefetch.streams.units import (
    FREE_DIVISOR,
    MIXED_ENTRIES,
    PAGE_BYTES,
    Units,
    cut,
)
from tests.rows import each_row

from .one_stream import COLUMNS
from .simulated_kernel import CHUNK_ENTRIES, shuffled

EPOCH = 160 * CHUNK_ENTRIES
ORDER = np.array(shuffled(1, EPOCH), np.uint32)
SHARE_FILES = EPOCH // 2


def cut_order(free_files: int, *, by_chunk: bool = True) -> Units:
    """The units of a random order, for a reader with memory for half of it."""
    positions = np.arange(EPOCH, dtype=np.int32)
    return cut(
        ORDER, positions, COLUMNS, SHARE_FILES * PAGE_BYTES, by_chunk=by_chunk,
        free_bytes=free_files * PAGE_BYTES,
    )  # fmt: skip


def whole_chunks(units: Units) -> list[int]:
    """The chunks that are units, in the order of the units."""
    found = []
    for unit in range(len(units)):
        chunks = ORDER[units.positions(unit)] // CHUNK_ENTRIES
        if len(chunks) == CHUNK_ENTRIES and (chunks == chunks[0]).all():
            found.append(int(chunks[0]))
    return found


@each_row("free_files", [EPOCH // FREE_DIVISOR + 1, EPOCH // 2, EPOCH])
def test_whole_chunks_of_a_random_order_go_into_free_memory(free_files: int) -> None:
    """Those that are read soonest, in three quarters of it. Each position is in one unit."""
    units = cut_order(free_files)
    found = whole_chunks(units)
    assert len(found) == free_files * 3 // 4 // CHUNK_ENTRIES
    soonest = list(dict.fromkeys((ORDER // CHUNK_ENTRIES).tolist()))
    assert found == soonest[: len(found)]
    assert np.sort(units.order).tolist() == list(range(EPOCH))


@each_row(
    ("free_files", "by_chunk"),
    [(0, True), (EPOCH // FREE_DIVISOR, True), (EPOCH, False)],
    ids=["no free memory", "memory for a quarter of the epoch", "an order log has the epoch"],
)
def test_other_random_orders_are_cut_into_mixed_units(free_files: int, by_chunk: bool) -> None:
    units = cut_order(free_files, by_chunk=by_chunk)
    assert whole_chunks(units) == []
    if by_chunk:
        assert units.positions(0).tolist() == list(range(MIXED_ENTRIES))


def test_a_few_files_of_a_chunk_are_no_unit_in_free_memory() -> None:
    """An epoch that reads four files of each chunk, all over it."""
    order = np.arange(0, EPOCH, CHUNK_ENTRIES // 4, dtype=np.uint32).reshape(-1, 4).T.ravel()
    positions = np.arange(len(order), dtype=np.int32)
    share_bytes = len(order) // 2 * PAGE_BYTES
    units = cut(order, positions, COLUMNS, share_bytes, free_bytes=2 * share_bytes)
    assert units.positions(0).tolist() == list(range(share_bytes // PAGE_BYTES // 8))

"""The table of owners that a master shares with the clients of its node."""

import mmap
import os

import numpy as np
import pytest

from diesel_fs.errors import CorruptError
from diesel_fs.peers.members.owner_table import OwnerTable, OwnerTableView

CHUNKS = 1000


def test_a_view_follows_the_table_and_outlives_it() -> None:
    table = OwnerTable(CHUNKS)
    view = OwnerTableView(table.descriptor, CHUNKS)
    assert view.owners.tolist() == [-1] * CHUNKS
    assert view.generation == 0
    table.set_owners(np.arange(CHUNKS) % 7)
    assert view.owners.tolist() == [chunk % 7 for chunk in range(CHUNKS)]
    assert view.generation == 1, "so that clients read the owners"
    table.bump_generation()
    assert view.generation == 2
    table.close()
    table.close()
    assert view.owners[10] == 3


def test_a_client_can_neither_write_nor_resize_the_table() -> None:
    table = OwnerTable(CHUNKS)
    size = os.fstat(table.descriptor).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(table.descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(table.descriptor, b"x", 0)
    for other in (size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(table.descriptor, other)
    view = OwnerTableView(table.descriptor, CHUNKS)
    with pytest.raises(ValueError, match="read-only"):
        view.owners[0] = 1
    table.set_owners(np.full(CHUNKS, 5))
    assert view.owners[0] == 5, "the master still can"
    table.close()


def test_a_table_of_another_size_or_that_could_shrink_is_refused() -> None:
    table = OwnerTable(CHUNKS)
    with pytest.raises(CorruptError, match="another size"):
        OwnerTableView(table.descriptor, CHUNKS + 1)
    size = os.fstat(table.descriptor).st_size
    table.close()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    with pytest.raises(CorruptError, match="shrink"):
        OwnerTableView(unsealed, CHUNKS)
    os.close(unsealed)


def test_each_table_has_another_inode() -> None:
    tables = [OwnerTable(CHUNKS) for _ in range(3)]
    assert len({OwnerTableView(each.descriptor, CHUNKS).inode for each in tables}) == 3
    for each in tables:
        each.close()

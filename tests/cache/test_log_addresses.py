"""A mount's server reads from order logs that the prefetch worker writes and removes."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from diesel_fs.cache.order_logs.addresses import LogAddresses, LogEntryReader, address_bytes
from diesel_fs.cache.order_logs.layout import file_name
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.format.snapshot.reader import Snapshot

from .conftest import FILES, Counting

NAMES = ("n001", "n002")


def open_files(folder: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing
            continue
    return [path for path in found if path.startswith(os.fspath(folder))]


def test_the_file_of_a_removed_log_is_closed(
    store: Counting, view: Snapshot, tmp_path: Path
) -> None:
    """An open file would keep its room on the disk, which the cache counts as free."""
    addresses = LogAddresses(memoryview(bytearray(address_bytes(len(view)))))
    reader = LogEntryReader(view, EntryReader(view, store, 1 << 20), os.fspath(tmp_path))
    entries = [np.array([view.lookup(name.encode())], np.uint32) for name in NAMES]
    with closing(reader):
        reader.share(addresses)
        for digest, (name, entry) in enumerate(zip(NAMES, entries, strict=True), 1):
            (tmp_path / file_name(digest)).write_bytes(FILES[name])
            addresses.put(digest, entry, np.array([0]))
            assert reader.read(int(entry[0]), 0, 1 << 20) == FILES[name]
        assert reader.stats()["log_hits"] == len(open_files(tmp_path)) == 2
        (tmp_path / file_name(1)).unlink()
        addresses.remove_log(1, entries[0])
        assert reader.read(int(entries[0][0]), 0, 1 << 20) == FILES["n001"], "from the store"
        reader.stats()
        assert open_files(tmp_path) == [str(tmp_path / file_name(2))]
    assert not open_files(tmp_path)

"""H8: listings of large folders are complete and in one order, also from any position."""

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting

pytestmark = pytest.mark.fuse

ENTRIES = 20_000
libc = ctypes.CDLL(None, use_errno=True)
libc.fdopendir.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_uint16),
        ("kind", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


libc.readdir.restype = ctypes.POINTER(_Dirent)


class Folder:
    """An open directory stream of the C library, with telldir and seekdir."""

    def __init__(self, path: Path) -> None:
        self._stream = ctypes.c_void_p(libc.fdopendir(os.open(path, os.O_RDONLY)))

    def read(self) -> bytes:
        """The next name; the empty one at the end."""
        found = libc.readdir(self._stream)
        return bytes(found.contents.name) if found else b""

    def tell(self) -> int:
        return int(libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        libc.seekdir(self._stream, ctypes.c_long(position))

    def close(self) -> None:
        libc.closedir(self._stream)

    def rest(self) -> list[bytes]:
        """All names from here on."""
        return list(iter(self.read, b""))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[LiveMount]:
    """A mount with a folder of 20,000 files."""
    source = tmp_path_factory.mktemp("large") / "source"
    (source / "many").mkdir(parents=True)
    for number in range(ENTRIES):
        os.close(os.open(source / "many" / f"{number:05}", os.O_CREAT | os.O_WRONLY, 0o644))
    with mounting(source, source.parent / "mount", session) as mounted:
        yield mounted


NAMES = [b".", b"..", *(b"%05d" % number for number in range(ENTRIES))]


def test_H8_a_listing_is_complete_and_sorted(large: LiveMount) -> None:
    """It has `.`, `..`, then the entries sorted by name, each once."""
    folder = Folder(large.at / "many")
    assert folder.rest() == NAMES
    assert folder.read() == b""
    folder.seek(0)
    assert folder.rest() == NAMES
    folder.close()


def test_H8_seekdir_leads_back_to_the_entry(large: LiveMount) -> None:
    """Positions of telldir stay valid, in the same stream and in another."""
    folder, other = Folder(large.at / "many"), Folder(large.at / "many")
    positions = [folder.tell()]
    while folder.read():
        positions.append(folder.tell())
    for place in (0, 1, 2, 3, 1023, 1026, 7777, ENTRIES + 1, ENTRIES + 2, 5, ENTRIES):
        folder.seek(positions[place])
        assert folder.read() == ([*NAMES, b""])[place]
        other.seek(positions[place])
        assert other.rest() == NAMES[place:]
    folder.close()
    other.close()


def test_H8_two_readers_at_once_get_all_entries(large: LiveMount) -> None:
    """Two readers at different positions of one folder both get all entries."""
    one, two = Folder(large.at / "many"), Folder(large.at / "many")
    found: tuple[list[bytes], list[bytes]] = ([], [])
    for _ in range(200):
        found[0].extend(filter(None, (one.read() for _ in range(150))))
        found[1].extend(filter(None, (two.read() for _ in range(90))))
    found[1].extend(two.rest())
    assert found == (NAMES, NAMES)
    one.close()
    two.close()
    names: list[list[str]] = []
    readers = [
        threading.Thread(target=lambda: names.append(os.listdir(large.at / "many")))
        for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert names[0] == names[1] == [name.decode() for name in NAMES[2:]]

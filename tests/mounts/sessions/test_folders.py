"""H8: listings of folders of 100,000 and of a million entries are complete and in one order, also
from any position."""

import ctypes
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diesel_fs.mounts import stats
from tests.mounts.conftest import mounting
from tests.mounts.folder_dataset import MANY, many_names
from tests.mounts.observed import current_stats, figures
from tests.processes import resident_bytes
from tests.tiers import fast_first

pytestmark = pytest.mark.fuse

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
        found = libc.readdir(self._stream)
        return bytes(found.contents.name) if found else b""

    def tell(self) -> int:
        return int(libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        libc.seekdir(self._stream, ctypes.c_long(position))

    def rewind(self) -> None:
        libc.rewinddir(self._stream)

    def close(self) -> None:
        libc.closedir(self._stream)

    def rest(self) -> list[bytes]:
        return list(iter(self.read, b""))


FIRST_REQUESTS_MAX = 5
"""Requests before the first name is there. The whole listing takes many times as many."""

SERVER_BYTES_MAX = 32 << 20
"""Memory that listings may add to the server. Keeping a million names would take 50 MB or more."""


@pytest.fixture(scope="module", params=fast_first([100_000, 1_000_000]))
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, session: str
) -> Iterator[tuple[Path, list[bytes]]]:
    base, count = tmp_path_factory.mktemp("many"), request.param
    (base / "source").mkdir()
    with mounting(base / "source", base / "mount", session, dataset=f"{MANY}{count}") as mounted:
        yield mounted.at / "many", many_names(count)


def listing_requests(at: Path) -> int:
    counts = figures(current_stats(at), "requests")
    return sum(count for name, count in counts.items() if "readdir" in name.lower())


def test_H8_names_come_in_order_from_anywhere(many: tuple[Path, list[bytes]], session: str) -> None:
    """The first ones come at once, and the server keeps no memory for them, except in a native
    mount. Positions of telldir stay valid, in the same stream and in another."""
    at, inside = many
    names = [b".", b"..", *inside]
    server = figures(stats(at.parent))["server_pid"]
    before, before_bytes = listing_requests(at.parent), resident_bytes(server)
    with os.scandir(at) as entries:
        next(entries)
    first = listing_requests(at.parent) - before
    folder, other = Folder(at), Folder(at)
    places = [folder.tell()]
    found = []
    while name := folder.read():
        found.append(name)
        places.append(folder.tell())
    assert found == names
    requests = listing_requests(at.parent) - before
    if session == "native":
        assert requests == 0
    elif session == "kernel":
        assert 0 < first <= FIRST_REQUESTS_MAX < requests / 4
    noise = random.Random(1)
    for place in [0, 1, 2, 1023, len(names) - 1, len(names), *noise.sample(range(len(names)), 200)]:
        for each in (folder, other):
            each.seek(places[place])
            assert [each.read() for _ in range(3)] == (names + [b""] * 3)[place : place + 3]
    for each in (folder, other):
        each.rewind()
        assert each.rest() == names
        each.close()
    assert resident_bytes(server) - before_bytes < SERVER_BYTES_MAX


def test_H8_readers_at_once_get_all_entries(many: tuple[Path, list[bytes]]) -> None:
    at, inside = many
    one, two = Folder(at), Folder(at)
    found: tuple[list[bytes], list[bytes]] = ([], [])
    for _ in range(200):
        found[0].extend(one.read() for _ in range(150))
        found[1].extend(two.read() for _ in range(90))
    for each, names in zip((one, two), found, strict=True):
        names.extend(each.rest())
        each.close()
    assert found == ([b".", b"..", *inside],) * 2
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: os.listdir(os.fsencode(at)), range(2))) == [inside] * 2
    listed = subprocess.run(["ls", "-f", at], check=True, capture_output=True).stdout
    assert listed.split(b"\n")[:-1] == found[0]

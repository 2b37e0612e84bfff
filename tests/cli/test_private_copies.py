"""Tests of a private copy of a snapshot that has a flipped bit (E12 in tests/FAULTS.md)."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.program import Server, new_repository
from tests.trees import Facts, facts, odd_tree, write

from .conftest import Dlcmd

# FORMAT.md, section 7, implemented a second time
TABLE_AT, ROW_BYTES = 160, 24
SECTIONS = {"name_start": 1, "flags": 2, "size": 3, "checksum": 8, "names": 11, "chunk_id": 15}
CHUNK_BYTES = 1 << 16


def of_header(at: int) -> Callable[[bytes], range]:
    return lambda _: range(at, at + 1)


def of_section(number: int) -> Callable[[bytes], range]:
    def found(data: bytes) -> range:
        offset, length = struct.unpack_from("<QQ", data, TABLE_AT + number * ROW_BYTES)
        assert length, "the section is empty, so a flip would change nothing"
        return range(offset, offset + length)

    return found


PLACES = {
    "header: magic": of_header(1),
    "header: version": of_header(33),
    "header: section table": of_header(TABLE_AT + 3 * ROW_BYTES + 16),
    **{name: of_section(number) for name, number in SECTIONS.items()},
}
"""A place of each kind; `tests/format/snapshot/test_hostile.py` shows that any flip is noticed."""


class User:
    """A user with a private copy of the snapshot, and the contents of the dataset."""

    def __init__(self, dlcmd: Dlcmd, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.dlcmd, self.top, self._patch = dlcmd, top, patch
        self.source, self.cache = top / "source", top / "cache"
        patch.setenv("XDG_CACHE_HOME", str(self.cache))
        odd_tree(self.source)
        write(self.source, {"large": os.urandom(3 * CHUNK_BYTES), "d/e/f/g": b"deep"})
        self.source.chmod(0o700)  # as a native mount shows it, which has no `--allow-other`
        dlcmd("put", "--chunk-size", str(CHUNK_BYTES), self.source, "pets")
        self.listed = dlcmd("ls", "-lR", "--json", "pets").out
        dlcmd("get", "pets", top / "before")
        assert facts(top / "before") == facts(self.source)

    def flip(self, place: Callable[[bytes], range]) -> None:
        (copy,) = (self.cache / "diesel/snapshots").iterdir()
        data = bytearray(copy.read_bytes())
        where = place(bytes(data))
        data[where[len(where) // 2]] ^= 1
        copy.write_bytes(data)  # written into the existing file

    def others_see(self) -> Facts:
        self._patch.setenv("XDG_CACHE_HOME", str(self.top / "another"))
        self.dlcmd("get", "pets", self.top / "others")
        return facts(self.top / "others")


@pytest.fixture
def user(dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(dlcmd, tmp_path, monkeypatch)


@pytest.mark.parametrize("place", PLACES)
def test_E12_a_flipped_bit_changes_no_answer_and_is_never_published(user: User, place: str) -> None:
    """`ls`, `get` and `verify` fetch the version again. The next put starts from the published
    snapshot."""
    user.flip(PLACES[place])
    assert user.dlcmd("ls", "-lR", "--json", "pets").out == user.listed
    user.flip(PLACES[place])
    user.dlcmd("get", "pets", user.top / "out")
    assert facts(user.top / "out") == facts(user.source)
    user.flip(PLACES[place])
    user.dlcmd("verify", "pets")
    assert "private copy" not in user.dlcmd("ls", "pets").err
    user.flip(PLACES[place])
    more = write(user.top / "more", {"one/more": b"more"})
    user.dlcmd.program("put", more / "one", "pets/one")
    user.dlcmd("verify", "pets")
    write(user.source, {"one/more": b"more"})
    times = {b".", b"one", b"one/more"}  # made a moment later
    expected = {path: what for path, what in facts(user.source).items() if path not in times}
    seen = user.others_see()
    assert {path: what for path, what in seen.items() if path not in times} == expected
    assert seen[b"one/more"][-1] == b"more"


DAMAGED = ["name_start", "checksum"]


@pytest.mark.fuse
@pytest.mark.parametrize("place", DAMAGED)
def test_E12_a_mount_shows_right_bytes(user: User, place: str) -> None:
    user.flip(PLACES[place])
    at = user.top / "mnt"
    user.dlcmd.program("mount", "pets", at)
    try:
        assert facts(at) == facts(user.source)
    finally:
        user.dlcmd.program("umount", at)


def test_E12_a_servers_client_fetches_the_version_again(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = dlcmd.store.as_uri()
    who = new_repository(url)["root"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "of the server")}
    with Server(tmp_path / "server", "--store", url, environment=cache) as server:
        monkeypatch.setenv("DIESEL_USER", who.user)
        monkeypatch.setenv("DIESEL_KEY", who.key_text)
        monkeypatch.setenv("DIESEL_URL", server.url)
        user = User(dlcmd, tmp_path, monkeypatch)
        for place in DAMAGED:
            user.flip(PLACES[place])
            assert dlcmd("ls", "-lR", "--json", "pets").out == user.listed

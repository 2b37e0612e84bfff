"""Damaged entries, lost stores, killed readers: only reads of lost bytes fail.

The datasets are real ones; the tests damage their chunks on the disk.
"""

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from diesel_fs.mounts import MountRequest, stats
from tests.mounts.conftest import mounting
from tests.mounts.observed import figures, mounted, noise, put, waiting_reads
from tests.processes import open_files, state_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.fuse, pytest.mark.only_session("native", "kernel", "pyfuse3")]

FILES = 40
SMALL_BYTES = (1, 4000, 4096, 9000, 30_000)
LARGE_BYTES = 11_000_003
DAMAGED = "17"


@dataclass(frozen=True, slots=True)
class Stored:
    contents: dict[str, bytes]
    store: Path

    def place(self, content: bytes) -> tuple[Path, int]:
        for path in self.store.glob("datasets/*/chunks/*/*"):
            if (at := path.read_bytes().find(content)) >= 0:
                return path, at
        raise AssertionError("no chunk has these bytes")

    @contextmanager
    def damaged(self, content: bytes) -> Iterator[str]:
        """Flip some bytes of this content in its chunk, and mend them at the end. Yields the
        chunk's name."""
        path, at = self.place(content)
        whole = path.read_bytes()
        middle = at + len(content) // 2
        flipped = bytes(255 - each for each in whole[middle : middle + 3])
        replace(path, whole[:middle] + flipped + whole[middle + len(flipped) :])
        try:
            yield path.name
        finally:
            replace(path, whole)


def replace(path: Path, content: bytes) -> None:
    """Replace a chunk, which a reader may have mapped, by a new file."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.rename(path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    store = tmp_path_factory.mktemp("damage") / "store"
    contents = {
        f"{number:02}": noise(number, SMALL_BYTES[number % len(SMALL_BYTES)])
        for number in range(FILES)
    }
    contents["large"] = noise(1000, LARGE_BYTES)
    put(store.as_uri(), contents)
    return Stored(contents, store)


@contextmanager
def mounted_anew(stored: Stored, base: Path, session: str, *, pushes: bool) -> Iterator[Path]:
    request = MountRequest(
        stored.store.as_uri(),
        "ds",
        str(base / "mount"),
        session=session,
        log_file=str(base / "log"),
        memory_bytes=0 if pushes else 1,
    )
    with mounted(request) as at:
        yield at


READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
MAP = (
    "import mmap, sys; file = open(sys.argv[1], 'rb');"
    " sys.stdout.buffer.write(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))"
)


def or_errno(call: Callable[[], bytes]) -> bytes | int:
    try:
        return call()
    except OSError as error:
        return error.errno or -1


def read_or_errno(path: Path) -> bytes | int:
    return or_errno(path.read_bytes)


ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "in order": sorted,
    "backwards": lambda names: sorted(names)[::-1],
    "at random": lambda names: random.Random(7).sample(names, len(names)),
}


@pytest.mark.parametrize("pushes", [True, False], ids=["pushes", "on demand"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_damaged_entry_is_EIO_and_its_neighbours_are_whole(
    stored: Stored, session: str, tmp_path: Path, order: str, pushes: bool
) -> None:
    expected = {**stored.contents, DAMAGED: errno.EIO}
    with (
        stored.damaged(stored.contents[DAMAGED]) as chunk,
        mounted_anew(stored, tmp_path, session, pushes=pushes) as at,
    ):
        for _ in range(2):
            for each in ORDERS[order](list(stored.contents)):
                assert read_or_errno(at / each) == expected[each], each
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if DAMAGED in line]
        assert any(f"ds/{DAMAGED} at 0 (chunk {chunk})" in line for line in lines), lines


def test_a_damaged_entry_is_SIGBUS_in_a_map_and_its_neighbours_are_whole(
    stored: Stored, session: str, tmp_path: Path
) -> None:
    with mounted_anew(stored, tmp_path, session, pushes=False) as at:
        with stored.damaged(stored.contents[DAMAGED]):
            command = [sys.executable, "-I", "-S", "-c", MAP, str(at / DAMAGED)]
            assert subprocess.run(command, check=False).returncode == -signal.SIGBUS
            for each, content in stored.contents.items():
                if each != DAMAGED:
                    with (
                        open(at / each, "rb") as file,
                        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
                    ):
                        assert bytes(mapped) == content, each
            assert read_or_errno(at / DAMAGED) == errno.EIO
        wait_until(lambda: read_or_errno(at / DAMAGED) == stored.contents[DAMAGED])


def test_one_damaged_extent_leaves_the_others(stored: Stored, session: str, tmp_path: Path) -> None:
    """The kernel repeats READs that failed, page by page; not each of them reaches the store."""
    content = stored.contents["large"]
    with (
        stored.damaged(content[5_000_000:5_000_300]),
        mounted_anew(stored, tmp_path, session, pushes=False) as at,
        open(at / "large", "rb", buffering=0) as file,
    ):
        assert read_or_errno(at / "large") == errno.EIO
        assert 1 <= figures(stats(at), "reads")["failed"] <= 8
        readable = []
        for place in range(0, LARGE_BYTES, 65_536):
            found = or_errno(lambda: os.pread(file.fileno(), 65_536, place))  # noqa: B023
            if found != errno.EIO:
                assert found == content[place : place + 65_536]
                readable.append(place)
        assert len(readable) * 65_536 > LARGE_BYTES / 2
        assert not any(abs(place - 5_000_000) < 65_536 for place in readable)
        assert os.pread(file.fileno(), 10_000, readable[-1]) == content[readable[-1] :][:10_000]


def test_read_contents_outlive_the_store(stored: Stored, session: str, tmp_path: Path) -> None:
    away = stored.store.with_name("away")
    with mounted_anew(stored, tmp_path, session, pushes=False) as at:
        assert (at / "00").read_bytes() == stored.contents["00"]
        stored.store.rename(away)
        try:
            assert (at / "00").read_bytes() == stored.contents["00"]
            assert sorted(os.listdir(at)) == sorted(stored.contents)
            with (
                open(at / "large", "rb", buffering=0) as file,
                pytest.raises(OSError, match="Input"),
            ):
                os.pread(file.fileno(), 4096, 9_000_000)
        finally:
            away.rename(stored.store)
        wait_until(lambda: read_or_errno(at / "large") == stored.contents["large"])


def started_reader(command: list[str], path: Path) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(command, stdout=subprocess.PIPE)
    wait_until(lambda: str(path) in open_files(started.pid))
    wait_until(lambda: state_of(started.pid) in "DS")
    return started


def kill(reader: subprocess.Popen[bytes]) -> None:
    reader.kill()
    assert reader.communicate()[0] == b""
    assert reader.returncode == -signal.SIGKILL


@pytest.mark.parametrize("program", [READ, MAP], ids=["read", "map"])
@pytest.mark.parametrize("size", [3000, 300_000])
def test_killed_readers_leave_no_zeros(
    session: str, tmp_path: Path, program: str, size: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    content = noise(3, size)
    for name in ("wait", "wait neighbour"):
        (source / name).write_bytes(content)
    with mounting(source, tmp_path / "mount", session) as mount:
        command = [sys.executable, "-I", "-S", "-c", program, str(mount.at / "wait")]
        for _ in range(3):
            killed = [started_reader(command, mount.at / "wait") for _ in range(3)]
            wait_until(lambda: waiting_reads(mount.at))
            for each in killed:
                kill(each)
        waiting = [started_reader(command, mount.at / "wait") for _ in range(2)]
        victim = started_reader(command, mount.at / "wait")
        kill(victim)
        mount.release_reads()
        assert [each.communicate()[0] for each in waiting] == [content] * 2
        assert (mount.at / "wait").read_bytes() == content
        assert (mount.at / "wait neighbour").read_bytes() == content

"""The content file without a mount: each READ gives the contents at their addresses, or EIO."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.image import BLOCK_BYTES, Image, Shown, build_image
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.tree import content_file
from diesel_fs.mounts.tree.attributes import FuseErrno, Owner
from diesel_fs.mounts.tree.content_file import ContentFile, ContentVersion
from diesel_fs.mounts.tree.vfs import Vfs
from tests.examples import examples
from tests.mounts.folder_dataset import snapshot_of
from tests.waiting import soon

SIZES = (0, 1, 4095, 4096, 4097, 20_000, 3, 300_000, 70_000, 5)


class Reader:
    """A `ContentReader` over a folder, in which some files fail and some hang."""

    def __init__(self, snapshot: Snapshot, source: Path) -> None:
        self._snapshot = snapshot
        self._source = source
        self.reads: list[str] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.stuck: set[str] = set()  # from the second time on they hang until the end
        self.in_memory: set[str] = set()
        self.go_on, self.closed = threading.Event(), threading.Event()

    def _name(self, index: int) -> str:
        return os.fsdecode(self._snapshot.path(index))

    def read(self, index: int, offset: int, size: int) -> memoryview:
        name = self._name(index)
        self.reads.append(name)
        if name in self.stuck and self.reads.count(name) > 1:
            self.closed.wait()
        elif name in self.hanging:
            self.go_on.wait()
        if name in self.failing:
            raise ObjectStoreError("the store has it no more")
        return memoryview((self._source / name).read_bytes())[offset : offset + size]

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        name = self._name(index)
        if name not in self.in_memory:
            return None
        return memoryview((self._source / name).read_bytes())[offset : offset + size]

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.go_on.set()
        self.closed.set()


class Content:
    def __init__(self, source: Path) -> None:
        snapshot = Snapshot(snapshot_of(source))
        pieces = build_image(snapshot, Shown(0, 0), uuid4())
        self.image = Image(b"".join(pieces), verify=True)
        self.reader = Reader(snapshot, source)
        self.vfs = Vfs(snapshot, self.reader, Owner(0, 0), read_deadline_s=60.0)
        self.file = ContentFile(self.image.chain)
        self.version = self.file.add(self.vfs, self.image)
        self.starts = {}
        self.bytes = bytearray(self.image.end_block * BLOCK_BYTES)
        for path in sorted(source.iterdir()):
            block = int(self.image.first_block[snapshot.lookup(path.name.encode())])
            if block:
                self.starts[path.name] = start = block * BLOCK_BYTES
                content = path.read_bytes()
                self.bytes[start : start + len(content)] = content

    def read(self, offset: int, size: int) -> bytes | int:
        async def answer() -> bytes:
            found = self.file.read_nowait(offset, size)
            return b"".join(await self.file.read(offset, size) if found is None else found)

        try:
            return trio.run(answer)
        except FuseErrno as error:
            return error.errno

    def span(self, first: str, last: str) -> tuple[int, int]:
        start, end = self.starts[first], self.starts[last] + BLOCK_BYTES
        return start, end - start


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, size in zip("abcdefghij", SIZES, strict=True):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return folder


@pytest.fixture
def content(source: Path) -> Iterator[Content]:
    made = Content(source)
    yield made
    made.vfs.close()


def test_a_READ_of_any_range_gives_contents_and_zeros_between(content: Content) -> None:
    """Any of the files may be in memory, and the range may have addresses that no file has any
    more."""
    noise = random.Random(1)
    blocks = len(content.bytes) // BLOCK_BYTES
    for _ in range(100):
        content.reader.in_memory = set(noise.sample("abcdefghij", noise.randrange(11)))
        first = noise.randrange(blocks + 3) * BLOCK_BYTES
        size = noise.choice([1, 1, 2, 5, 30, blocks]) * BLOCK_BYTES
        expected = bytes(content.bytes[first : first + size]).ljust(size, b"\0")
        assert content.read(first, size) == expected


def test_one_file_that_fails_fails_the_READ_and_no_READ_of_others(content: Content) -> None:
    content.reader.failing = {"c"}
    assert content.read(*content.span("b", "d")) == errno.EIO
    for name in "bd":
        start = content.starts[name]
        assert content.read(start, BLOCK_BYTES) == bytes(content.bytes[start : start + BLOCK_BYTES])
    assert content.read(content.starts["c"], BLOCK_BYTES) == errno.EIO


class Outage:
    """A version of one file, whose store fails until a moment of a simulated clock."""

    def __init__(self, well_s: float, fails_in_s: float) -> None:
        self.attempts = 0
        self.last_failure_s = 0.0
        self._well_s, self._fails_in_s = well_s, fails_in_s
        extent = SimpleNamespace(start=0, size=1 << 20)
        vfs = SimpleNamespace(
            snapshot=SimpleNamespace(extents=lambda *_: [extent]),
            read=self._read,
            errno_of=lambda *_: errno.EIO,
        )
        self.version = ContentVersion(cast("Vfs", vfs), memoryview(b""), memoryview(b""))

    async def _read(self, node: int, offset: int, size: int) -> bytes:
        self.attempts += 1
        if trio.current_time() < self._well_s:
            await trio.sleep(self._fails_in_s)
            self.last_failure_s = trio.current_time()
            raise ObjectStoreError("the store is away")
        await trio.sleep(0.005)
        return bytes(size)

    async def succeeds(self) -> bool:
        try:
            return bool(await self.version.read(0, 0, 4096))
        except FuseErrno:
            return False


@examples(200)
@given(
    well_s=st.floats(0, 9),
    fails_in_s=st.sampled_from([0.0, 0.001, 0.2, 3.0, 20.0]),
    paces_s=st.lists(st.sampled_from([0.02, 0.2, 0.9, 1.1, 7.0]), min_size=1, max_size=4),
)
def test_H22_the_first_READ_after_an_outage_succeeds(
    well_s: float, fails_in_s: float, paces_s: list[float]
) -> None:
    """Readers may try often: after an attempt that took long, READs fail for a second more."""
    outage = Outage(well_s, fails_in_s)
    late: list[float] = []

    async def read_again_and_again(pace_s: float) -> None:
        done = False
        while not done:
            begun_s = trio.current_time()
            done = await outage.succeeds()
            since_s = begun_s - max(well_s, outage.last_failure_s)
            if not done and since_s > min(fails_in_s, 1.0) + 1e-6:
                late.append(since_s)
            await trio.sleep(pace_s)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for pace_s in paces_s:
                nursery.start_soon(read_again_and_again, pace_s)
        assert await outage.succeeds()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert late == []


def test_READs_that_the_kernel_repeats_do_not_each_wait_for_a_hanging_store() -> None:
    """It sends two for each page of a failed read-ahead, one after the other."""
    outage = Outage(1e9, 30.0)

    async def main() -> None:
        begun_s = trio.current_time()
        for _ in range(512):
            assert not await outage.succeeds()
            await trio.sleep(0.001)
        assert trio.current_time() - begun_s < 32

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert outage.attempts == 1


def test_a_file_that_hangs_delays_the_files_beside_it_only_for_a_moment(
    content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A READ of several files fails then; one of that file alone waits."""
    monkeypatch.setattr(content_file, "PATIENCE_S", 0.2)
    content.reader.hanging = {"c"}
    assert content.read(*content.span("b", "d")) == errno.EIO
    start = content.starts["b"]
    assert content.read(start, BLOCK_BYTES) == bytes(content.bytes[start : start + BLOCK_BYTES])
    threading.Timer(0.6, content.reader.go_on.set).start()
    start = content.starts["c"]
    assert content.read(start, BLOCK_BYTES) == bytes(content.bytes[start : start + BLOCK_BYTES])


def test_READs_of_a_file_that_wait_fail_together(content: Content) -> None:
    """Otherwise the second one would hang for longer than the first."""
    content.reader.hanging = content.reader.failing = content.reader.stuck = {"h"}
    found: list[int] = []

    async def read(block: int) -> None:
        try:
            await content.file.read(content.starts["h"] + block * BLOCK_BYTES, BLOCK_BYTES)
        except FuseErrno as error:
            found.append(error.errno)

    async def read_two() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(read, number)
                await soon(lambda number=number: len(content.reader.reads) > number)
            content.reader.go_on.set()

    trio.run(read_two)
    assert found == [errno.EIO] * 2


def test_a_bug_in_reading_one_file_is_EIO_and_names_the_file(
    content: Content, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: int, offset: int, size: int) -> memoryview:
        raise KeyError("a bug")

    for method in ("read", "read_nowait"):
        with monkeypatch.context() as patch:
            patch.setattr(content.reader, method, fail)
            assert content.read(content.starts["e"], BLOCK_BYTES) == errno.EIO
        assert "read of folder/e failed: KeyError" in caplog.text
        caplog.clear()
        content.version.failed.clear()

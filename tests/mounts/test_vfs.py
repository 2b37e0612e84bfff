"""The file system without a mount: nodes, listings, the files of `.diesel`, reads in full."""

import errno
import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.tree.attributes import (
    ABSENT,
    ABSENT_NOW,
    HIDDEN_ROOT,
    ROOT,
    Attributes,
    FuseErrno,
    Owner,
)
from diesel_fs.mounts.tree.dot_diesel import HiddenFile
from diesel_fs.mounts.tree.vfs import MountHooks, Vfs
from tests.clocks import ManualClock
from tests.mounts.folder_dataset import FolderReader, snapshot_of
from tests.rows import each_row

MANY = 1034


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def vfs(source: Path, clock: ManualClock) -> Vfs:
    (source / "link").symlink_to("a")
    (source / "many").mkdir()
    for number in range(MANY):
        (source / "many" / f"{number:05}").touch()
    content = snapshot_of(source)
    snapshot = Snapshot(content)
    return Vfs(
        snapshot,
        FolderReader(snapshot, source),
        Owner(1, 2, 0o022),
        MountHooks(
            files={
                b"snapshot": HiddenFile(lambda: content),
                b"same": HiddenFile(lambda: bytes([1, 2]), max_age_s=1.0),
            }
        ),
        clock=clock,
    )


def test_a_node_is_the_index_and_one(vfs: Vfs) -> None:
    assert vfs.attributes(ROOT).node == 1
    for name in (b"a", b"b", b"link", b"many"):
        found = vfs.lookup(ROOT, name)
        assert found.node == vfs.snapshot.lookup(name) + 1
        assert found == vfs.attributes(found.node)
    assert vfs.lookup(ROOT, b"none") == ABSENT
    assert vfs.link_target(vfs.lookup(ROOT, b"link").node) == b"a"
    assert stat.S_IMODE(vfs.attributes(ROOT).mode) & 0o022 == 0
    assert stat.S_IMODE(vfs.lookup(ROOT, b"link").mode) == 0o777
    assert stat.S_IMODE(vfs.attributes(HIDDEN_ROOT).mode) == 0o555


@each_row("node", [0, -1, 99_999, HIDDEN_ROOT - 1, HIDDEN_ROOT + 9, 1 << 63])
def test_an_unknown_node_is_stale(vfs: Vfs, node: int) -> None:
    for call in (vfs.attributes, lambda node: vfs.read_nowait(node, 0, 1)):
        with pytest.raises(FuseErrno) as raised:
            call(node)
        assert raised.value.errno == errno.ESTALE


def test_listings_agree_with_attributes(vfs: Vfs) -> None:
    folder = vfs.lookup(ROOT, b"many").node
    names: list[bytes] = []
    while (part := vfs.child_columns(folder, len(names), 400)) is not None:
        bounds = pairwise(part.name_start.tolist())
        part_names = [part.names[start:end].tobytes() for start, end in bounds]
        columns = (part.nodes, part.mode, part.size, part.mtime_ns)
        rows = zip(part_names, *(column.tolist() for column in columns), strict=True)
        for name, *attributes in rows:
            assert tuple(attributes) == vfs.lookup(folder, name)[:4]
            names.append(name)
    assert names == [b"%05d" % number for number in range(MANY)]
    assert vfs.child_columns(vfs.lookup(ROOT, b"a").node, 0, 400) is None


async def test_a_hidden_file_has_a_new_node_whenever_it_changes(
    vfs: Vfs, clock: ManualClock
) -> None:
    async def hidden(name: bytes) -> Attributes:
        return await vfs.lookup_hidden(HIDDEN_ROOT, name)

    first, same = await hidden(b"stats"), await hidden(b"same")
    vfs.count_lookup(first.node)
    content = vfs.read_nowait(first.node, 0, first.size)
    clock.now_s = 0.99
    vfs.requests["read"] += 1
    assert await hidden(b"stats") == first, "they do not change for a second"
    clock.now_s = 1.0
    second = await hidden(b"stats")
    assert second.node > first.node
    assert vfs.read_nowait(first.node, 0, 9999) == content
    vfs.forget(first.node, 1)
    with pytest.raises(FuseErrno):
        vfs.read_nowait(first.node, 0, 9999)
    snapshot = await hidden(b"snapshot")
    clock.now_s = 1e6
    assert await hidden(b"snapshot") == snapshot
    assert await hidden(b"same") == same
    assert await hidden(b"nothing") == ABSENT_NOW


async def test_contents_of_stats_that_the_kernel_forgot_are_freed(
    vfs: Vfs, clock: ManualClock
) -> None:
    """A program that reads the statistics again and again fills no memory."""
    nodes = []
    for second in range(1000):
        clock.now_s = 2.0 * second
        nodes.append((await vfs.lookup_hidden(HIDDEN_ROOT, b"stats")).node)
        vfs.count_lookup(nodes[-1])
        vfs.forget(nodes[-1], 1)
    assert len(set(nodes)) == 1000
    for old in nodes[:-1]:
        with pytest.raises(FuseErrno):
            vfs.attributes(old)


async def test_reads_are_in_full_or_refused(vfs: Vfs, source: Path) -> None:
    node = vfs.lookup(ROOT, b"a").node
    assert vfs.read_nowait(node, 0, 10) is None
    assert await vfs.read(node, 4995, 4096) == b"alpha"
    assert vfs.read_nowait(node, 0, 4096) == (b"alpha" * 1000)[:4096]
    assert vfs.read_nowait(node, 5000, 4096) == b""
    assert vfs.read_nowait(node, 9999, 4096) == b""
    os.truncate(source / "b", 2)
    with pytest.raises(FuseErrno) as raised:
        await vfs.read(vfs.lookup(ROOT, b"b").node, 0, 4096)
    assert raised.value.errno == errno.EIO
    assert vfs.reads == {"hits": 1, "misses": 2, "held": 0, "failed": 1, "bytes": 5 + 4096}

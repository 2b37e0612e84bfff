"""The page cache of a native mount: pushes, the staging area and drops."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.readers.coalescing_reader import ExtentBatch
from diesel_fs.format.snapshot.diff import diff_snapshots
from diesel_fs.mounts.prefetch.pages.content_page_cache import ContentPageCache
from tests.mounts.observed import noise
from tests.mounts.prefetch.content_mount import ContentMount, content_mount
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        os.geteuid() != 0 or "erofs" not in Path("/proc/filesystems").read_text(),
        reason="only root mounts EROFS, where the kernel has it",
    ),
]

SIZES = (0, 1, 2, 100, 4095, 4096, 4097, 8192, 10_000, 131_072, 300_001, 1_500_000)


def files(count: int, size: int = 10_000) -> dict[bytes, bytes]:
    return {b"folder%d/%05d" % (i % 3, i): noise(i, size) for i in range(count)}


@contextmanager
def page_cache(mounted: ContentMount, staging_bytes: int = 1 << 30) -> Iterator[ContentPageCache]:
    made = ContentPageCache(
        str(mounted.at), mounted.snapshot, mounted.server.device, mounted.image,
        mounted.server.content,
        staging_bytes,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def settle_all(cache: ContentPageCache, mounted: ContentMount) -> None:
    wait_until(lambda: not cache.tidy() and mounted.server.content_bytes() == 0)


def whole_pages(contents: dict[bytes, bytes]) -> int:
    return sum(-(-len(content) // 4096) * 4096 for content in contents.values())


@pytest.mark.parametrize("seed", range(4))
def test_pushed_files_are_read_without_a_request(tmp_path: Path, seed: int) -> None:
    """On a busy machine a kernel may reclaim a page before it is read, but not each time."""
    reads: list[int] = []
    while 0 not in reads:
        assert len(reads) < 5, f"READs in each run: {reads}"
        (tmp_path / str(len(reads))).mkdir()
        reads.append(reads_of_what_was_pushed(tmp_path / str(len(reads)), seed))


def reads_of_what_was_pushed(at: Path, seed: int) -> int:
    """Push files of all sizes, in batches of any order and with gaps, and one in parts. Read them
    before and after they are settled: how many requests this took."""
    rng = random.Random(seed)
    sizes = [rng.choice(SIZES) for _ in range(60)] + [rng.randrange(20_000) for _ in range(200)]
    contents = {b"%03d" % at: noise(at, size) for at, size in enumerate(sizes)}
    with content_mount(at, contents) as mounted, page_cache(mounted) as cache:
        entries = mounted.entries().tolist()
        part = rng.sample(entries, rng.randrange(1, len(entries)))
        if seed % 2:
            part.sort()
        pushed = [*part]
        while part:
            count = rng.randrange(1, 100)
            batch, part = part[:count], part[count:]
            assert cache.store(mounted.batch(batch)) == []
        large = next(e for e in entries if len(mounted.content_of(e)) == 1_500_000)
        content = memoryview(mounted.content_of(large))
        for start in range(0, len(content), 1 << 16):
            starts = np.array([start])
            cache.store(
                ExtentBatch(np.array([large]), starts, [content[start : start + (1 << 16)]])
            )
        pushed = sorted({*pushed, large})
        for entry in rng.sample(pushed, len(pushed) // 2):
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        settle_all(cache, mounted)
        for entry in pushed:
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        reads = mounted.server.reads
        for entry in entries:
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        return reads


def test_memory_is_held_once_when_all_is_settled(tmp_path: Path) -> None:
    """`resident_bytes` is right before and after."""
    contents = files(500)
    with content_mount(tmp_path, contents) as mounted, page_cache(mounted) as cache:
        entries = mounted.entries()
        cache.store(mounted.batch(entries[:400]))
        pushed_bytes = 400 * 12_288
        assert (mounted.server.content_bytes(), mounted.tree_bytes()) == (pushed_bytes, 0)
        for _ in range(2):
            found = [cache.resident_bytes(entry) for entry in entries.tolist()]
            assert found == [12_288] * 400 + [0] * 100
            settle_all(cache, mounted)
        assert mounted.tree_bytes() == pushed_bytes
        assert mounted.server.reads == 0


def test_the_staging_area_is_bounded(tmp_path: Path) -> None:
    """Files without room are settled, and read without a request."""
    contents, staging_bytes = files(2_000), 2 << 20
    with content_mount(tmp_path, contents) as mounted, page_cache(mounted, staging_bytes) as cache:
        entries = mounted.entries()
        for start in range(0, len(entries), 64):
            cache.store(mounted.batch(entries[start : start + 64]))
        wait_until(lambda: mounted.server.content_bytes() <= staging_bytes)
        assert mounted.server.content_bytes() > staging_bytes // 2
        for entry in entries.tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        assert mounted.server.reads == 0


def test_files_are_dropped_on_both_sides(tmp_path: Path) -> None:
    """They can be pushed again, and again."""
    contents = files(300)
    with content_mount(tmp_path, contents) as mounted, page_cache(mounted, 1 << 20) as cache:
        entries = mounted.entries()
        for _ in range(3):
            cache.store(mounted.batch(entries))
            cache.drop(entries, lambda: None)
        cache.store(mounted.batch(entries))
        for entry in entries[:100].tolist():
            mounted.path(entry).read_bytes()
        settle_all(cache, mounted)
        assert mounted.tree_bytes() == whole_pages(contents)
        cache.drop(entries[50:150], lambda: None)
        wait_until(lambda: cache.resident_bytes(int(entries[149])) == 0)
        settle_all(cache, mounted)
        kept = [*entries[:50].tolist(), *entries[150:].tolist()]
        assert all(cache.resident_bytes(entry) for entry in kept)
        assert not any(cache.resident_bytes(entry) for entry in entries[50:150].tolist())
        assert mounted.server.reads == 0
        for entry in entries.tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        assert mounted.server.reads > 0


def test_only_the_parts_that_were_pushed_are_settled(tmp_path: Path) -> None:
    size = 3_000_000
    with (
        content_mount(tmp_path, {b"large": noise(1, size)}) as mounted,
        page_cache(mounted) as cache,
    ):
        entry, content = mounted.entry(b"large"), memoryview(mounted.contents[b"large"])
        half = 1 << 20
        cache.store(ExtentBatch(np.array([entry]), np.array([half]), [content[half : 2 * half]]))
        settle_all(cache, mounted)
        assert cache.resident_bytes(entry) == half
        assert mounted.server.reads == 0


def test_only_opens_by_readers_are_reported(tmp_path: Path) -> None:
    """Watched files are settled without an open."""
    with content_mount(tmp_path, files(600)) as mounted, page_cache(mounted, 1 << 20) as cache:
        entries = mounted.entries()
        watched = entries[::50].tolist()
        cache.opens.watch(watched)
        cache.store(mounted.batch(entries))
        settle_all(cache, mounted)
        assert cache.opens.read() == []
        for entry in entries[:201].tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        assert cache.opens.read() == watched[:5]
        cache.opens.unwatch(watched)
        mounted.path(watched[0]).read_bytes()
        assert cache.opens.read() == []
        assert mounted.server.reads == 0


def test_contents_that_reads_have_brought_are_held_once(tmp_path: Path) -> None:
    contents = files(100)
    with content_mount(tmp_path, contents) as mounted, page_cache(mounted) as cache:
        for entry in mounted.entries().tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        assert mounted.server.content_bytes() >= whole_pages(contents)
        cache.note_reads()
        settle_all(cache, mounted)
        assert mounted.tree_bytes() == whole_pages(contents)


def test_a_content_that_is_too_large_does_not_reach_into_its_neighbour(tmp_path: Path) -> None:
    with content_mount(tmp_path, files(3, 4096)) as mounted, page_cache(mounted) as cache:
        entries = mounted.entries()
        batch = mounted.batch(entries)
        damaged = [batch.contents[0], memoryview(bytes(5000)), batch.contents[2]]
        assert cache.store(ExtentBatch(batch.entries, batch.starts, damaged)) == [1]
        for entry in entries[[0, 2]].tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)
        assert mounted.server.reads == 0
        assert mounted.path(entries[1]).read_bytes() == mounted.content_of(entries[1])


def test_a_killed_process_leaves_all_readable(tmp_path: Path) -> None:
    contents = files(600)
    with content_mount(tmp_path, contents) as mounted, page_cache(mounted, 1 << 20) as cache:
        entries = mounted.entries()
        for start in range(0, len(entries), 50):
            cache.store(mounted.batch(entries[start : start + 50]))
            if start == 300:
                os.kill(cache._process.pid, signal.SIGKILL)
        for entry in entries.tolist():
            assert mounted.path(entry).read_bytes() == mounted.content_of(entry)


def test_another_version_takes_over_the_staging_area(tmp_path: Path) -> None:
    """If files are unchanged. Others are read with a request, and all bytes are right."""
    before = files(200)
    after = {name: content for name, content in before.items() if not name.endswith(b"7")}
    changed = [name for name in after if name.endswith(b"3")]
    after |= {name: noise(9, 10_000) for name in changed} | {b"new": b"new"}
    with content_mount(tmp_path, before) as mounted:
        with page_cache(mounted) as old:
            old.store(mounted.batch(mounted.entries()[:100]))
            settle_all(old, mounted)
            staged = mounted.entries()[100:]
            old.store(mounted.batch(staged))
        newer = ContentMount(tmp_path, after, mounted)
        try:
            with page_cache(newer) as cache:
                diff = diff_snapshots(mounted.snapshot, newer.snapshot)
                kept = cache.inherit(old, diff)
                expected = {mounted.snapshot.path(e) for e in staged.tolist()} & set(after)
                expected -= set(changed)
                found = np.flatnonzero(kept >= 0).tolist()
                assert {newer.snapshot.path(entry) for entry in found} == expected
                assert (kept[found] == diff.unchanged[found]).all()
                reads = newer.server.reads
                for entry in found[::2]:
                    assert newer.path(entry).read_bytes() == newer.content_of(entry)
                settle_all(cache, newer)
                for entry in found:
                    assert newer.path(entry).read_bytes() == newer.content_of(entry)
                assert newer.server.reads == reads
                for entry in newer.entries().tolist():
                    assert newer.path(entry).read_bytes() == newer.content_of(entry)
        finally:
            newer.close()

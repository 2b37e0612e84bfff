"""What native mounts hold in memory, with little of it, with plans, and when their worker fails.

Readers are C-like loops in processes of their own that check every byte. The oracle is cachestat(2)
on the content file and on the files of the tree.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import children_of
from diesel_fs.mounts.plans.control import Control, explicit
from diesel_fs.mounts.sessions.native import PRIVATE_NODE
from diesel_fs.mounts.tree.content_file import CONTENT_BYTES, private_name
from diesel_fs.system.syscalls import cached_bytes
from tests.bench.control_group import ControlGroup
from tests.mounts.observed import (
    Processes,
    count_of_reads,
    current_stats,
    figures,
    locked_in_memory,
    noise,
    put,
)
from tests.mounts.prefetch.test_pressure import limited_group
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        os.geteuid() != 0 or "erofs" not in Path("/proc/filesystems").read_text(),
        reason="only root mounts EROFS, where the kernel has it",
    ),
]

FILE_BYTES = 50_000
FILE_PAGES_BYTES = -(-FILE_BYTES // 4096) * 4096
MIB = 1 << 20
PROCESSES_BYTES = 72 * MIB  # of the mount and a reader

MOUNT = """if True:
    import sys
    from diesel_fs.mounts import MountRequest, mount
    mount(MountRequest.from_json(sys.argv[1].encode()))
"""

READ = f"""if True:
    import os, random, sys
    folder = sys.argv[1]
    for number in map(int, sys.argv[2].split(",")):
        file = os.open("%s/%d/%06d" % (folder, number % 7, number), os.O_RDONLY)
        content = os.read(file, {FILE_BYTES} + 1)
        os.close(file)
        if content != random.Random(number).randbytes({FILE_BYTES}):
            sys.exit("wrong bytes in %d" % number)
"""


def name_of(number: int) -> str:
    return f"{number % 7}/{number:06}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 160 MiB."""
    made = (tmp_path_factory.mktemp("native") / "store").as_uri()
    put(made, {name_of(number): noise(number, FILE_BYTES) for number in range(FILES)})
    for chunk in Path(made.removeprefix("file://")).rglob("*"):
        if chunk.is_file():
            chunk.read_bytes()  # into the page cache, at the expense of this process's group
    return made


FILES = 160 * MIB // FILE_PAGES_BYTES
DATASET_BYTES = FILES * FILE_PAGES_BYTES


class NativeMount:
    def __init__(self, at: Path, prefix: list[str]) -> None:
        self.at = at
        self._prefix = prefix

    def read(self, numbers: list[int]) -> None:
        """Read these files in a process of the mount's group, and check them."""
        command = [*self._prefix, sys.executable, "-S", "-c", READ, str(self.at)]
        for start in range(0, len(numbers), 5_000):
            listed = ",".join(map(str, numbers[start : start + 5_000]))
            subprocess.run([*command, listed], check=True, timeout=60)

    def content_bytes(self) -> int:
        file = os.open(self.at / ".diesel" / private_name(PRIVATE_NODE), os.O_RDONLY)
        try:
            return cached_bytes(file, 0, CONTENT_BYTES)
        finally:
            os.close(file)

    def tree_bytes(self) -> int:
        """How many bytes of the files that users see are in the page cache."""
        return sum(self.cached_bytes(self.at / name_of(number)) for number in range(FILES))

    def cached_bytes(self, path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            return cached_bytes(file.fileno(), 0, os.fstat(file.fileno()).st_size)


@contextmanager
def mounting(
    url: str, at: Path, group: ControlGroup | None = None, **options: object
) -> Iterator[NativeMount]:
    at.mkdir()
    request = MountRequest(url, "ds", str(at), session="native", **options)  # type: ignore[arg-type]  # fields by name
    prefix = [] if group is None else group.prefix
    command = [*prefix, sys.executable, "-c", MOUNT, request.to_json().decode()]
    subprocess.run(command, check=True, timeout=60)
    try:
        yield NativeMount(at, prefix)
    finally:
        if mounted_at(str(at)):
            umount(at, force=True)


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(FILES), FILES)


def residency(at: Path) -> dict[str, int]:
    return figures(current_stats(at), "residency")


@pytest.mark.deep
@pytest.mark.alone  # it needs processors: files that were read must be dropped in time
@pytest.mark.parametrize(("policy", "memory_share"), [("on-demand", 0.0), ("oneshot", 0.9)])
def test_an_epoch_over_two_thirds_of_the_memory_reads_nothing_twice(
    tmp_path: Path, url: str, policy: str, memory_share: float
) -> None:
    """The mount and its reader are in one group, with room for their processes, too. After the
    epoch, each content is in memory once, and a second epoch makes hardly any request."""
    contents_bytes = DATASET_BYTES * 3 // 2
    memory_bytes = int(contents_bytes * memory_share)
    with (
        limited_group(contents_bytes + PROCESSES_BYTES) as group,
        mounting(url, tmp_path / "mount", group, policy=policy, memory_bytes=memory_bytes) as made,
    ):
        made.read(shuffled(1))
        wait_until(lambda: made.content_bytes() + made.tree_bytes() <= 1.25 * DATASET_BYTES)
        assert made.tree_bytes() > 0.9 * DATASET_BYTES
        before = count_of_reads(made.at)
        made.read(shuffled(2))
        assert count_of_reads(made.at) - before < FILES // 10
        store = figures(current_stats(made.at), "residency", "store")
        assert store["fetched_bytes"] < 1.1 * DATASET_BYTES


def test_files_beyond_the_staging_area_become_resident_once(tmp_path: Path, url: str) -> None:
    """With `oneshot`; the staging area is a sixteenth of the memory for pages."""
    memory_bytes = DATASET_BYTES * 3 // 2
    at = tmp_path / "mount"
    with mounting(url, at, policy="oneshot", memory_bytes=memory_bytes) as made:
        wait_until(lambda: made.tree_bytes() > 0.99 * DATASET_BYTES)
        wait_until(lambda: made.content_bytes() == 0)
        before = count_of_reads(made.at)
        made.read(shuffled(3))
        assert (
            count_of_reads(made.at) - before < FILES // 30
        )  # the machine may take idle pages away


@pytest.mark.deep
def test_files_behind_the_window_of_a_plan_are_dropped_on_both_sides(tmp_path: Path) -> None:
    """The memory of the mount is a tenth of the dataset. Files that a reader has passed are neither
    in the tree nor in the content file; it finds nearly all files without a request."""
    count, size, memory_bytes = 24_000, 4_096, 12 * MIB
    url, at = (tmp_path / "store").as_uri(), tmp_path / "mount"
    content = random.Random(1).randbytes(size - 8)
    put(url, {name_of(number): number.to_bytes(8, "little") + content for number in range(count)})
    with mounting(url, at, memory_bytes=memory_bytes) as made, Control.connect(at) as control:
        snapshot = Snapshot((at / ".diesel/snapshot").read_bytes())
        order = snapshot.files()
        np.random.default_rng(1).shuffle(order)
        paths = [at / os.fsdecode(path) for path in snapshot.paths(order)]
        control.announce("reader", [explicit(epoch=0, entries=order)])
        before, part = count_of_reads(made.at), 500
        for start in range(0, count, part):
            deadline_s = time.monotonic() + 2
            while (
                time.monotonic() < deadline_s and not control.resident(order[start:][:part]).all()
            ):
                time.sleep(0.01)
            for path in paths[start : start + part]:
                assert path.read_bytes()[8:] == content
            if start == 12_000:
                passed = order[:9_000]
                assert np.count_nonzero(control.resident(passed)) < 500
                wait_until(lambda: made.content_bytes() < memory_bytes // 8)
                assert sum(made.cached_bytes(path) for path in paths[:9_000]) < 500 * size
        assert count_of_reads(made.at) - before < count // 20


def test_readers_go_on_without_the_worker(tmp_path: Path, url: str) -> None:
    """While it is stopped at any moment, and after it was killed. Every byte is right."""
    rng = random.Random(1)
    at = tmp_path / "mount"
    with mounting(url, at, policy="oneshot", memory_bytes=DATASET_BYTES) as made:
        worker = Processes.of(at).worker
        for _ in range(5):
            os.kill(worker, signal.SIGSTOP)
            made.read(rng.sample(range(FILES), 100))
            os.kill(worker, signal.SIGCONT)
            time.sleep(0.05)
        for helper in children_of(worker):  # the process that advises the kernel
            os.kill(helper, signal.SIGKILL)
        made.read(rng.sample(range(FILES), 200))
        os.kill(worker, signal.SIGKILL)
        made.read(shuffled(4))
    assert not mounted_at(str(at))


def test_a_file_of_several_chunks_is_not_pushed_because_it_was_missed(tmp_path: Path) -> None:
    """READs bring it, which the kernel sends ahead of the reader; a push would bring it again."""
    url = (tmp_path / "store").as_uri()
    large = random.Random(1).randbytes(9 * MIB)
    put(url, {"large": large})
    put(url, {f"small{number}": b"small" for number in range(9)})  # in another chunk
    with (
        mounting(url, tmp_path / "mount") as made,
        locked_in_memory(made.at / "large"),
    ):
        assert (made.at / "large").read_bytes() == large
        assert (made.at / "small4").read_bytes() == b"small"
        wait_until(lambda: residency(made.at)["pushed_entries"] > 0)
        assert residency(made.at)["pushed_bytes"] < MIB
        assert made.cached_bytes(made.at / "large") == len(large)

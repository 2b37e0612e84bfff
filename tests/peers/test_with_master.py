"""Readers and a real master on one node: workers share its memory, and may die at any time."""

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import diesel_fs
from diesel_fs.client.dataset import Dataset
from diesel_fs.errors import UsageError
from diesel_fs.mounts import launcher
from tests.processes import is_running, resident_bytes
from tests.tiers import fast_first
from tests.waiting import until, wait_until

from ..small_disks import remount, small_disk
from ..trees import write
from .children import fork
from .running import connected, stats_at

FILES = {f"d{i % 7}/n{i:04}": os.urandom(2000 + i) for i in range(1200)}
LITTLE_MEMORY = 100_000
WORKERS = 4
AT_ONCE_S = 4.0  # a chunk that cannot be written takes 5
TREE = Path(__file__).resolve().parents[2]


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        self.masters: set[int] = set()

    def connect(self, **more: object) -> Dataset:
        return diesel_fs.connect("ds", self.url, memory_bytes=LITTLE_MEMORY, **more)  # type: ignore[arg-type]  # by name

    def join(self, **more: object) -> Dataset:
        return self.connect(task="training", **more)

    def sockets(self) -> list[Path]:
        return list((self.folder / "run/diesel/tasks").glob("*/0/socket"))

    @property
    def socket(self) -> Path:
        [found] = self.sockets()
        return found

    def stats(self) -> dict[str, dict[str, int]]:
        return cast("dict[str, dict[str, int]]", stats_at(self.socket))

    def master(self) -> int:
        with connected(self.socket) as link:
            credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        self.masters.add(pid)
        return pid

    def end(self) -> None:
        with suppress(ValueError, OSError):
            self.master()
        for pid in self.masters:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path, runtime: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    with diesel_fs.connect("ds", made.url, create=True) as dataset:
        for path, content in FILES.items():
            dataset.put(content, path)
    yield made
    made.end()


def has_ended(pid: int) -> bool:
    return not is_running(pid)


def check(dataset: Dataset, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(FILES))
    paths = [list(FILES)[at] for at in order.tolist()]
    for path, content in zip(paths, dataset.read_many(paths), strict=True):
        assert content == FILES[path], path
    assert dataset.get(paths[0]) == FILES[paths[0]]


def test_workers_of_a_node_share_chunks_that_were_fetched_once(node: Node) -> None:
    with node.join() as dataset:
        check(dataset, 0)

        def work(seed: int) -> None:
            check(dataset, seed)
            check(dataset, seed + 10)

        for wait in [fork(partial(work, seed)) for seed in range(WORKERS)]:
            wait()
        with node.join() as other:
            check(other, 9)
            assert other.task_stats()["answers"]
        with deepcopy(dataset) as other:  # as in a process that is spawned
            check(other, 8)
            assert other.task_stats()["answers"]
        figures = node.stats()
        assert figures["chunks_from_store"] == len(dataset.snapshot.chunk_sizes)  # type: ignore[comparison-overlap]  # one is a number
        assert dataset._reader.stats()["chunk_fetches"] == 0


@pytest.mark.deep
def test_F15_ten_thousand_workers_that_die_during_a_read_leave_nothing(node: Node) -> None:
    with node.join() as dataset:
        check(dataset, 0)
        here = node.folder / "s"
        here.symlink_to(node.socket)  # a short path
        identity, version = dataset.snapshot.identity.hex, str(dataset.version)
        master = node.master()

        def crash(count: int) -> None:
            program = [sys.executable, "-m", "tests.peers.crashing_workers"]
            command = [*program, "s", identity, version, str(count)]
            environment = {**os.environ, "PYTHONPATH": str(TREE)}
            subprocess.run(command, check=True, timeout=400, cwd=node.folder, env=environment)

        def held() -> tuple[int, int]:
            return len(os.listdir(f"/proc/{master}/fd")), node.stats()["node_cache"]["pinned_bytes"]

        files, lent = held()

        def let_go() -> bool:
            files_now, lent_now = held()
            return files_now <= files + 1 and lent_now == lent  # one may just have sent a request

        crash(500)
        until(let_go, "the master to release everything")
        resident = resident_bytes(master, "VmRSS")
        crash(9_500)
        until(let_go, "the master to release everything")
        assert resident_bytes(master, "VmRSS") < resident + (8 << 20)
        check(dataset, 1)
        assert node.stats()["members"] == 1  # type: ignore[comparison-overlap]  # a number


@pytest.mark.real_start
@pytest.mark.parametrize("version", ["the first", "another"])
def test_F1_a_killed_master_costs_no_reader_a_read(node: Node, version: str) -> None:
    with node.join() as dataset:
        check(dataset, 0)
        if version == "another":
            dataset.put(b"new", "d0/new")
            dataset.flush()
            check(dataset, 0)
        view = next(iter(dataset.read_many(list(FILES)[:1])))
        killed = node.master()
        os.kill(killed, signal.SIGKILL)
        check(dataset, 1)
        assert view == next(iter(FILES.values())), "its lent memory outlives it"

        def is_used() -> object:
            check(dataset, 2)
            return dataset.task_stats()["answers"]

        until(is_used, "a new master, which a reader has started")
        assert node.master() != killed
        assert node.stats()["version"] == dataset.version  # type: ignore[comparison-overlap]  # numbers
        check(dataset, 3)


def test_a_reader_does_not_restart_a_master_that_was_ended(node: Node) -> None:
    with node.join() as dataset:
        check(dataset, 0)
        os.kill(node.master(), signal.SIGTERM)
        until(lambda: not node.sockets(), "its end")
        for seed in range(10):  # a reader looks for it after one second, and after two more
            check(dataset, seed)
            time.sleep(0.5)
        assert not dataset.task_stats()["answers"]
        with node.join() as other:
            check(other, 1)
            assert other.task_stats()["answers"]


@pytest.mark.real_start
def test_a_task_leaves_nothing_on_its_node(node: Node) -> None:
    tasks = node.folder / "run" / "diesel" / "tasks"
    with node.join() as dataset:
        check(dataset, 0)
        master = node.master()
        assert list(tasks.glob("*/**"))
    os.kill(master, signal.SIGTERM)
    until(lambda: not is_running(master), "its end")
    assert list(tasks.glob("*/**")) == []


class Cached:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.folder = node.folder / "cache"

    def join(self, task: str = "training", cache_bytes: int | None = 64 << 20) -> Dataset:
        how = {"cache_dir": self.folder, "cache_bytes": cache_bytes, "task_memory_bytes": 64 << 20}
        return self.node.connect(task=task, rank=0, world=1, **how)

    def kept(self) -> set[Path]:
        return {each for each in self.folder.rglob("*") if len(each.name) == 32 and each.is_file()}

    def ends(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        until(lambda: not self.node.sockets(), "it")

    @contextmanager
    def ending(self) -> Iterator[int]:
        """The process of a master that is ending and still has chunks to write, each of which takes
        seconds."""
        with self.join() as dataset:
            check(dataset, 0)
            master = self.node.master()
            with (self.folder / ".diesel-cache").open("rb") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX)
                self.ends(master)
                yield master

    def is_over(self, pid: int) -> None:
        self.ends(pid)
        until(lambda: not is_running(pid), "its end")


def from_store(dataset: Dataset) -> object:
    return dataset.task_stats()["chunks_from_store"]


@pytest.mark.parametrize("task", ["training", "another"])
def test_a_job_starts_with_the_chunks_of_the_previous_one(node: Node, task: str) -> None:
    cached = Cached(node)
    with cached.join() as dataset:
        check(dataset, 0)
        chunks = len(dataset.snapshot.chunk_sizes)
        master = node.master()
    assert not cached.kept()
    cached.is_over(master)
    assert len(cached.kept()) == chunks
    with cached.join(task) as dataset:
        check(dataset, 0)
        figures = dataset.task_stats()
        assert (figures["chunks_from_store"], figures["client"]["store_reads"]) == (0, 0)  # type: ignore[index]  # a document
        assert node.master() != master


def test_a_second_signal_ends_a_master_at_once(node: Node) -> None:
    with Cached(node).ending() as master:
        time.sleep(1)
        assert is_running(master)
        os.kill(master, signal.SIGTERM)
        until(lambda: not is_running(master), "its end", AT_ONCE_S)


def test_F1_a_master_killed_during_its_flush_leaves_whole_chunks(node: Node) -> None:
    cached = Cached(node)
    with cached.ending() as master:
        os.kill(master, signal.SIGKILL)
        until(lambda: not is_running(master), "its end")
    with cached.join() as dataset:
        check(dataset, 1)
        assert dataset.task_stats()["answers"]
        assert dataset._reader.stats()["healed"] == 0


def test_a_new_master_does_not_wait_for_one_that_flushes(node: Node) -> None:
    with Cached(node).ending() as master:
        assert is_running(master)
        with node.join() as again:  # without the folder, which is locked
            until(lambda: not is_running(master), "its end", AT_ONCE_S)
            check(again, 1)
            assert again.task_stats()["answers"]
            assert node.master() != master


def test_J4_a_restarted_master_keeps_the_cache(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the cache may take half of the free disk: chunks that it holds already count as
    free."""
    kept: list[set[Path]] = []
    with small_disk(node.folder / "cache", "size=7m,mode=700") as point:
        cached = Cached(node)
        for seed in range(4):
            with cached.join(cache_bytes=None) as dataset:
                check(dataset, seed)
                chunks = len(dataset.snapshot.chunk_ids)
                assert from_store(dataset) == (0 if seed else chunks)
                master = node.master()
            cached.is_over(master)
            kept.append(cached.kept())
            if seed == 2:
                assert "is only read" not in caplog.text
                remount(point, "ro")
    assert kept[0]
    assert kept == kept[:1] * 4
    assert "is only read: Read-only file system" in caplog.text


@pytest.mark.parametrize("options", ["size=64k,mode=700", "size=64k,mode=700,ro"])
def test_J1_F11_an_unusable_disk_at_the_start_is_a_warning(
    node: Node, options: str, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(node.folder / "disk", options) as point:
        with suppress(OSError), (point / "lost+found").open("wb", 0) as file:
            file.write(bytes(1 << 20))
        for folder in (point, point / "new"):
            with node.join(cache_dir=folder) as dataset:
                check(dataset, 0)
                assert dataset.task_stats()["answers"]
                Cached(node).ends(node.master())
            assert f"{folder}: cannot be used for a cache: " in caplog.text
            assert "this node keeps nothing on a disk" in caplog.text


def test_room_for_no_chunk_is_a_warning(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with node.connect() as dataset:
        largest = int(dataset.snapshot.chunk_sizes.max())
    with node.join(task_memory_bytes=largest) as dataset:
        check(dataset, 0)
        assert dataset.task_stats()["answers"]
        master = node.master()
    Cached(node).is_over(master)
    assert caplog.messages == []
    how = {"cache_dir": node.folder / "cache", "cache_bytes": 5000, "task_memory_bytes": 900_000}
    with node.join(**how) as dataset:
        check(dataset, 0)
    [disk, memory] = caplog.messages
    assert disk.startswith("--cache-size leaves room for 5,000 bytes of chunks on")
    assert memory.startswith("--memory leaves room for 0 bytes of chunks in")
    assert f"{largest:,}" in disk
    assert f"{largest:,}" in memory


def test_a_writer_switches_the_version_and_common_chunks_stay(node: Node) -> None:
    with node.join() as dataset:
        check(dataset, 0)
        fetched = node.stats()["chunks_from_store"]
        dataset.put(b"new", "d0/new")
        dataset.flush()
        assert dataset.get("d0/new") == b"new"
        check(dataset, 1)
        figures = node.stats()
        assert figures["version"] == dataset.version  # type: ignore[comparison-overlap]  # numbers
        assert figures["chunks_from_store"] == fetched + 1  # type: ignore[operator]  # numbers
        assert dataset.task_stats()["answers"]


def test_a_reader_that_switches_the_version_keeps_its_master_from_idling(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader may read nothing for some time."""
    with diesel_fs.connect("ds", node.url, task="training") as dataset:
        check(dataset, 0)  # mapped: memory has room for it
        with node.connect() as writer:
            writer.put(b"new", "new")
        dataset.refresh()
        assert dataset._task is not None
        assert dataset._task._link.is_connected
    assert "reading from the store" not in caplog.text


def test_a_reader_that_joins_after_a_put_gets_a_master_at_once(node: Node) -> None:
    with node.join() as dataset:
        check(dataset, 0)
        before = node.master()
    with node.connect() as writer:
        writer.put(b"new", "new")
    with node.join() as dataset:
        check(dataset, 1)
        assert dataset.task_stats()["answers"]
        assert node.stats()["version"] == dataset.version  # type: ignore[comparison-overlap]  # numbers
        assert node.master() != before


def test_a_reader_of_another_version_gets_a_master_when_all_others_have_gone(node: Node) -> None:
    with ExitStack() as others:
        first = others.enter_context(node.join())
        check(first, 0)
        with node.connect() as writer:
            writer.put(b"new", "new")
        with node.join() as second:
            check(second, 1)
            assert not second.task_stats()["answers"]
            check(first, 1)
            assert first.task_stats()["answers"]
            others.close()

            def answers() -> object:
                check(second, 2)
                return second.task_stats()["answers"]

            until(answers, "a master of its own", 60)
            assert node.stats()["version"] == second.version  # type: ignore[comparison-overlap]  # numbers


def test_an_address_in_use_is_an_error_of_the_task(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=r": Address already in use(\n|;|$)"):
            node.join(peers=[place], task_key="k" * 32)


@pytest.mark.fuse
@pytest.mark.parametrize("session", fast_first(["kernel", "pyfuse3"]))
def test_a_mount_reads_through_the_task(node: Node, session: str) -> None:
    folder = node.folder / "mount"
    folder.mkdir()
    command = [sys.executable, "-m", "dlcmd", "--url", node.url]
    options = ["--task", "training", "--memory", "256M", "--session", session, "--follow"]
    subprocess.run([*command, "mount", *options, "ds", folder], check=True, timeout=60)
    second = node.folder / "second"
    second.mkdir()
    options[3] = "128M"
    errors = subprocess.run(
        [*command, "mount", *options, "ds", second],
        check=True, timeout=60, capture_output=True, text=True,
    ).stderr  # fmt: skip
    launcher.umount(second)
    assert errors.count("--memory: ignored") == 1, errors
    try:
        for path, content in FILES.items():
            assert (folder / path).read_bytes() == content
        with node.join() as dataset:
            check(dataset, 0)
            assert node.stats()["chunks_from_store"] == len(dataset.snapshot.chunk_sizes)  # type: ignore[comparison-overlap]  # numbers
            budget = node.stats()["node_cache"]["memory_budget_bytes"]
            assert budget == (256 - 32 << 20) * 3 // 4

        def figures() -> dict[str, object]:
            task: dict[str, object] = launcher.stats(folder)["task"]  # type: ignore[assignment]  # as it is
            return task

        until(lambda: figures().get("answers"), "the task in the mount's figures")
        shown = subprocess.run(
            [*command, "stats", folder], check=True, timeout=60, capture_output=True, text=True
        )
        assert "the task's cache:" in shown.stdout
        with node.connect() as writer:
            writer.put(b"new", "d0/new")
        until((folder / "d0/new").exists, "the mount to follow")
        assert (folder / "d0/new").read_bytes() == b"new"
        until(lambda: node.stats()["version"] == figures().get("version"), "the master to follow")
        for path, content in list(FILES.items())[::50]:
            assert (folder / path).read_bytes() == content
    finally:
        launcher.umount(folder)


@pytest.mark.fuse
def test_a_mount_with_only_a_cache_folder_has_a_task_of_its_own(node: Node) -> None:
    folder, cache = node.folder / "mount", node.folder / "cache"
    folder.mkdir()
    with (
        node.connect() as dataset,
        diesel_fs.mount(
            dataset, folder, memory_bytes=128 << 20, cache_dir=cache, cache_bytes=64 << 20
        ),
    ):
        for path, content in FILES.items():
            assert (folder / path).read_bytes() == content
        assert node.stats()["node_cache"]["disk_failures"] == 0
        until(lambda: any(cache.rglob("*")), "the cache to be used")


@pytest.mark.deep
@pytest.mark.fuse
def test_a_mount_reads_a_large_file_from_the_files_of_the_disk_cache(node: Node) -> None:
    """So the master does not copy its chunks into memory, and the store is not asked."""
    folder, content = node.folder / "mount", os.urandom(20 << 20)
    folder.mkdir()
    with node.connect() as dataset:
        dataset.put(content, "large")
    figures = []
    for _ in range(2):
        with (
            node.connect() as dataset,
            diesel_fs.mount(
                dataset, folder, memory_bytes=256 << 20, cache_dir=node.folder / "cache",
                cache_bytes=64 << 20,
            ),
        ):  # fmt: skip
            assert (folder / "large").read_bytes() == content
            figures.append(node.stats()["node_cache"])
            master = node.master()
        os.kill(master, signal.SIGTERM)  # it writes its chunks
        wait_until(partial(has_ended, master))
    first, second = figures
    assert first["memory_chunks"] >= 5
    assert second["disk_reads"] >= 5
    assert (second["memory_chunks"], second["fetches"]) == (0, 0)


@pytest.mark.fuse
def test_a_dataset_in_a_task_is_mounted_through_it(node: Node) -> None:
    folder = node.folder / "mount"
    write(folder, {})
    with node.join() as dataset, diesel_fs.mount(dataset, folder, memory_bytes=128 << 20):
        for path, content in list(FILES.items())[::10]:
            assert (folder / path).read_bytes() == content
        assert len(list((node.folder / "run/diesel/tasks").glob("*/*/socket"))) == 1
        until(
            lambda: "answers" in str(launcher.stats(folder).get("task")), "the task in the figures"
        )

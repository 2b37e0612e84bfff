"""Order logs of real mounts: the files that one epoch reads come from the local disk in the next
one.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Self, cast

import numpy as np
import pytest

from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.disk.speed import SPEED_FILE, DiskSpeed
from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.plans.control import Control, explicit
from diesel_fs.peers.members.options import TaskKwargs, TaskOptions
from tests.cli.conftest import program_environment
from tests.mounts.observed import Processes, current_stats, figures, mounted, noise, put
from tests.rows import each_row
from tests.small_disks import small_disk
from tests.waiting import wait_until

FILES, FILE_BYTES = 6_000, 9_000
MEMORY = 16 << 20  # a third of the files
FEW = 2_500  # 22 MB

STEP = 30
"""Files that are read without a look at the mount: fewer than it always pushes ahead."""


pytestmark = [pytest.mark.fuse, pytest.mark.only_session("native", "kernel", "pyfuse3")]


def names_of(files: int) -> list[str]:
    return [f"{number % 9}/{number}" for number in range(files)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for files in (FEW, FILES):
        contents = (noise(number, FILE_BYTES) for number in range(files))
        put((folder / str(files)).as_uri(), dict(zip(names_of(files), contents, strict=True)))
    return folder


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled / str(FILES), tmp_path / "store", symlinks=True))


class Training:
    def __init__(self, at: Path, files: int = FILES) -> None:
        self.at = at
        self.files = files
        self.names = names_of(files)
        snapshot = Snapshot((at / ".diesel/snapshot").read_bytes())
        self.index = np.array([snapshot.lookup(name.encode()) for name in self.names])
        self.control = Control.connect(at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()

    def order(self, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.random.default_rng(epoch).permutation(self.files)

    def announce(self, *epochs: int) -> None:
        self.control.announce(
            "train", [explicit(epoch=each, entries=self.index[self.order(each)]) for each in epochs]
        )

    def extend(self, epoch: int) -> None:
        order = self.index[self.order(epoch)]
        self.control.extend("train", [explicit(epoch=epoch, entries=order)])

    def read(self, epoch: int) -> None:
        program = (
            "import json, sys, hashlib\n"
            "for path in json.load(sys.stdin):\n"
            "    with open(path, 'rb') as f: print(hashlib.blake2b(f.read()).hexdigest())\n"
        )
        order = self.order(epoch).tolist()
        paths = json.dumps([f"{self.at}/{self.names[each]}" for each in order])
        done = subprocess.run(
            ["python3", "-c", program], input=paths, capture_output=True, text=True, check=True,
            env=program_environment(),
        )  # fmt: skip
        found = done.stdout.split()
        assert len(found) == self.files
        for each, digest in zip(order, found, strict=True):
            assert digest == hashlib.blake2b(noise(each, FILE_BYTES)).hexdigest()

    def read_in_step(self, epoch: int) -> None:
        order = self.order(epoch).tolist()
        for at in range(0, self.files, STEP):
            some = order[at : at + STEP]
            wait_until(lambda: self.pushed(epoch) >= at + len(some))  # noqa: B023  # called at once
            for each in some:
                file = os.open(f"{self.at}/{self.names[each]}", os.O_RDONLY)
                try:
                    assert os.read(file, FILE_BYTES) == noise(each, FILE_BYTES)
                finally:
                    os.close(file)
            if at + len(some) < self.files:
                self.control.progress("train", at + len(some), epoch)

    def pushed(self, epoch: int) -> int:
        streams = figures(self.control.stats(), "residency")["streams"]
        [stream] = cast("list[dict[str, int]]", streams)
        is_before = stream["epoch"] == epoch - 1  # its last files are about to be noticed
        return stream["frontier"] - (stream["length"] if is_before else 0)

    def log_hits(self) -> int:
        """How many files came from logs: pushed, or for READs of a reader that outruns pushes."""
        return self.logs()["log_hits"] + figures(current_stats(self.at), "cache")["log_hits"]

    def logs(self) -> dict[str, int]:
        return figures(current_stats(self.at), "residency", "store")


def request(store: Path, at: Path, cache: Path, session: str) -> MountRequest:
    at.mkdir(exist_ok=True)
    task = TaskOptions(cache_dir=str(cache), cache_layout="order", cache_bytes=100 << 20)
    return MountRequest(
        store.as_uri(), "ds", str(at), session=session, memory_bytes=MEMORY, task_options=task
    )


def test_later_epochs_need_no_store(store: Path, tmp_path: Path, session: str) -> None:
    """All chunks are gone after the first epoch."""
    wanted = request(store, tmp_path / "at", tmp_path / "cache", session)
    with mounted(wanted) as at, Training(at) as job:
        job.announce(0, 1)
        job.read(0)
        wait_until(lambda: job.logs()["log_next_entries"] == FILES)
        [used] = (tmp_path / "cache").glob("*/*/.used")
        assert used.stat().st_size == 28
        with used.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in store.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                path.rename(path.with_name(path.name + ".gone"))
        for epoch in (1, 2):
            job.extend(epoch + 1)
            job.read(epoch)
            wait_until(lambda: job.logs()["log_next_entries"] == FILES)
        logs = job.logs()
        assert logs["log_wrong"] == logs["log_refused"] == 0
        assert logs["log_bytes"] < 2 * FILES * FILE_BYTES


@pytest.mark.deep
def test_auto_changes_to_logs_when_they_pay(filled: Path, tmp_path: Path, session: str) -> None:
    """They pay for files that are small on this disk and do not fit the memory, once the next order
    is known. The chunks that the cache has by then make room.

    The reader waits for pushes: pages that READs bring would stay in the kernel's memory, and no
    log would be read.
    """
    dataset_bytes = FEW * FILE_BYTES
    cache = tmp_path / "cache"
    cache_bytes = dataset_bytes * 3 // 2  # the log, and less than half of the chunks
    (prepare_cache_folder(cache) / SPEED_FILE).write_bytes(DiskSpeed(10**8, 10**8, 2_000).packed())
    given: TaskKwargs = {"cache_dir": str(cache), "cache_bytes": cache_bytes}
    options = TaskOptions.from_kwargs(given, str(tmp_path / "at"))
    wanted = request(filled / str(FEW), tmp_path / "at", cache, session)

    def used_bytes() -> int:
        return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())

    with mounted(replace(wanted, task_options=options)) as at, Training(at, FEW) as job:
        job.announce(0)
        job.read_in_step(0)
        wait_until(lambda: used_bytes() > dataset_bytes // 2)
        assert "log_hits" not in job.logs()
        job.extend(1)
        job.extend(2)
        job.read_in_step(1)
        # Files that were still in memory were not read, so the log lacks them
        wait_until(
            lambda: job.logs()["log_next_entries"] > 0.8 * FEW, otherwise=lambda: str(job.logs())
        )
        before = job.log_hits()
        job.read_in_step(2)
        # All but the files that were in memory, or pushed before the log had them. The figures may
        # come late.
        wait_until(lambda: job.log_hits() - before > 0.6 * FEW, otherwise=lambda: str(job.logs()))
        assert job.logs()["log_refused"] == 0


def test_a_mount_after_a_kill_reads_from_the_log(store: Path, tmp_path: Path, session: str) -> None:
    wanted = request(store, tmp_path / "at", tmp_path / "cache", session)
    with mounted(wanted) as at, Training(at) as job:
        job.announce(0, 1)
        job.read(0)
        wait_until(lambda: job.logs()["log_next_entries"] == FILES)
        os.kill(Processes.of(at).worker, signal.SIGKILL)
    with mounted(wanted) as at, Training(at) as job:
        job.announce(1, 2)
        wait_until(lambda: job.logs().get("log_recovered") == 1)
        job.read(1)
        wait_until(lambda: job.log_hits() > 0.9 * FILES, otherwise=lambda: str(job.logs()))
        assert job.logs()["log_wrong"] == 0


@pytest.mark.deep
def test_two_mounts_of_one_order_share_a_folder(store: Path, tmp_path: Path, session: str) -> None:
    """The second one goes without a log; both read right."""
    with (
        mounted(request(store, tmp_path / "one", tmp_path / "cache", session)),
        mounted(request(store, tmp_path / "two", tmp_path / "cache", session)),
        Training(tmp_path / "one") as one,
        Training(tmp_path / "two") as two,
    ):
        for job in (one, two):
            job.announce(0, 1)
            job.read(0)
        # Files that READs brought get into the log when the worker has time
        wait_until(lambda: one.logs()["log_next_entries"] == FILES)
        assert two.logs()["log_next_entries"] == 0


@pytest.mark.deep
@each_row("options", ["ro,size=64m", f"size={FILES * FILE_BYTES // 4}"])
def test_a_folder_that_takes_no_log_harms_nothing_else(
    store: Path, tmp_path: Path, session: str, options: str
) -> None:
    with (
        small_disk(tmp_path / "disk", options) as disk,
        mounted(request(store, tmp_path / "at", disk / "cache", session)) as at,
        Training(at) as job,
    ):
        job.announce(0, 1)
        job.read(0)
        job.extend(2)
        job.read(1)


def test_a_layout_needs_a_folder() -> None:
    for layout in ("order", "chunks"):
        with pytest.raises(UsageError, match="a layout of a cache without its folder"):
            TaskOptions.from_kwargs({"cache_layout": layout}, "x")
    refused: tuple[TaskKwargs, ...] = ({}, {"cache_dir": "/c", "cache_layout": "order"})
    for words in refused:
        with pytest.raises(UsageError, match="only for a cache folder with the layout auto"):
            TaskOptions.from_kwargs({**words, "order_log_below": 5_000}, "x")
    with pytest.raises(UsageError, match="bad cache_layout"):
        TaskOptions.from_kwargs({"cache_layout": "rows", "cache_dir": "/c"}, "x")  # type: ignore[typeddict-item]

"""Order logs: what is read comes back from the disk in the order of the next epoch."""

import errno
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from diesel_fs.cache import order_log
from diesel_fs.cache.coalescing_reader import CoalescingReader
from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
from diesel_fs.cache.order_log import LoggedReader, LogPlan, OrderLogs
from diesel_fs.cache.tiers import ChunkKey
from diesel_fs.errors import NoSpaceError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.orders.plan import Entries
from diesel_fs.repository.local import LocalRepository
from diesel_fs.system.syscalls import punch_hole

from ..server.program import until
from ..small_disks import remount, small_disk
from ..trees import write
from .conftest import Counting
from .disk_tier import STORE

Given = ParamSpec("Given")
Made = TypeVar("Made")

FILES = {f"{i % 7}/f{i:04}": os.urandom(500 + 7 * i % 4000) for i in range(1500)} | {
    "large": os.urandom(2 * CHUNK_BYTES_MIN + 5),
    "empty": b"",
    "text": b"words " * 3000,
}
TOTAL = sum(map(len, FILES.values()))
SEGMENT, STAGED = 64 << 10, 128 << 10


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder = tmp_path_factory.mktemp("logs")
    source = write(folder / "source", FILES)
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="lz4", jobs=1)
        put(opened, "ds", FolderSource(source), options=options)
        yield opened


@pytest.fixture
def view(repository: LocalRepository) -> Snapshot:
    return repository.view("ds")


@pytest.fixture
def store(repository: LocalRepository) -> Counting:
    return Counting(repository)


class Job:
    """A reader of epochs through order logs, which checks every byte."""

    def __init__(
        self, view: Snapshot, store: Counting, place: Path, limit: int = 4 * TOTAL,
        staged: int = STAGED,
    ) -> None:  # fmt: skip
        self.view, self.store = view, store
        self.disk = DiskTier(prepare_cache_folder(place), STORE, limit)
        self.logs = OrderLogs(view, self.disk, staged_bytes=staged, segment_bytes=SEGMENT)
        self.reader = LoggedReader(CoalescingReader(view, store), self.logs)
        self.content = {view.lookup(name.encode()): content for name, content in FILES.items()}

    def order(self, seed: int) -> Entries:
        files = self.view.files()
        files = files[self.view.columns.size[files] > 0]
        return np.random.default_rng(seed).permutation(files).astype(np.uint32)

    def epoch(
        self, current: Entries, following: Entries | None, *, read: Entries | None = None,
        unit: int = 20, part: float = 1.0,
    ) -> int:  # fmt: skip
        """Read an epoch (`part` of it, or other files); returns the bytes read from the store."""
        before = sum(size for _, _, size in self.store.reads)
        self.logs.set_plan([LogPlan("train", current, following)])
        self.logs.settle()
        wanted = current if read is None else read
        for begin in range(0, int(part * len(wanted)), unit):
            some = wanted[begin : begin + unit]
            self.reader.prefetch([some, wanted[begin + unit : begin + 2 * unit]])
            found: dict[int, bytearray] = {}
            for batch in self.reader.batches(some):
                for entry, start, content in zip(*batch, strict=True):
                    room = found.setdefault(int(entry), bytearray(len(self.content[int(entry)])))
                    room[start : start + len(content)] = content
            assert {entry: bytes(content) for entry, content in found.items()} == {
                entry: self.content[entry] for entry in some.tolist()
            }
            if read is None:
                self.logs.passed("train", begin)
        self.logs.settle()
        return sum(size for _, _, size in self.store.reads) - before

    def on_disk(self) -> int:
        return self.logs.stats()["log_bytes"]

    def kill(self) -> None:
        """End as a killed process does: what is staged is lost, all locks are free."""
        self.logs._thread.shutdown(wait=True, cancel_futures=True)
        for each in self.logs._logs.values():
            os.close(each.file)
        os.close(self.logs._lock_file)
        self.disk.close()

    def close(self) -> None:
        self.reader.close()
        self.disk.close()


@contextmanager
def job(
    view: Snapshot, store: Counting, place: Path, limit: int = 4 * TOTAL, staged: int = STAGED
) -> Iterator[Job]:
    made = Job(view, store, place, limit, staged)
    try:
        yield made
    finally:
        made.close()


LARGE = len(FILES["large"])
"""Files of several extents are in no log."""


def test_after_the_first_epoch_nothing_comes_from_the_store(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    """And both logs together never need the room of two."""
    with job(view, store, tmp_path / "c", TOTAL * 3 // 2) as each:
        orders = [each.order(seed) for seed in range(5)]
        assert each.epoch(orders[0], orders[1]) >= TOTAL / 2  # the store has it compressed
        for number in range(1, 4):
            assert each.epoch(orders[number], orders[number + 1]) <= LARGE * 1.1
            assert each.on_disk() < TOTAL * 1.2
        stats = each.logs.stats()
        assert stats["log_wrong"] == stats["log_refused"] == 0
        # One read a segment, as all of it is wanted at once
        assert stats["log_reads"] <= 3 * (TOTAL // SEGMENT + 3)
        assert stats["log_written_bytes"] <= 4 * TOTAL * 1.05


def test_a_log_that_holds_half_spares_half_of_the_reads(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    """The first half of each epoch, which is there when it begins."""
    room = TOTAL // 2 + 2 * STAGED + 2 * SEGMENT
    with job(view, store, tmp_path / "c", room) as each:
        orders = [each.order(seed) for seed in range(4)]
        each.epoch(orders[0], orders[1])
        for number in (1, 2):
            each.epoch(orders[number], orders[number + 1])
            stats = each.logs.stats()
            assert each.on_disk() <= room
        hits = stats["log_hit_bytes"] / 2 / TOTAL
        assert 0.42 < hits < 0.52
        assert stats["log_refused"] == 0


def test_an_unknown_next_order_is_read_entry_by_entry(
    view: Snapshot, store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is nothing to warn of."""
    with job(view, store, tmp_path / "c") as each, caplog.at_level(logging.WARNING):
        orders = [each.order(seed) for seed in range(4)]
        each.epoch(orders[0], None)
        for number in (1, 2, 3):
            assert each.epoch(orders[number], None) <= LARGE * 1.1
        assert each.epoch(each.order(9), each.order(10)) <= LARGE * 1.1
        assert each.epoch(each.order(10), None) <= LARGE * 1.1
    assert not caplog.records


def test_the_same_order_each_epoch_is_written_once(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    with job(view, store, tmp_path / "c") as each:
        order = each.order(1)
        each.epoch(order, order)
        written = each.logs.stats()["log_written_bytes"]
        for _ in range(2):
            assert each.epoch(order, order) <= LARGE * 1.1
        assert each.logs.stats()["log_written_bytes"] == written


def test_a_reader_that_leaves_its_order_gets_the_right_bytes(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    with job(view, store, tmp_path / "c") as each:
        each.epoch(each.order(0), each.order(1))
        each.epoch(each.order(1), each.order(2), read=each.order(5))
        # The next epoch is another than was announced
        assert each.epoch(each.order(7), each.order(8)) <= LARGE * 1.1


def test_two_streams_share_the_disk(view: Snapshot, store: Counting, tmp_path: Path) -> None:
    """Two ranks: what one reads is written for the epoch of the other. Each segment is read once,
    though the ranks read in turns."""
    with job(view, store, tmp_path / "c") as each:
        orders = [each.order(seed) for seed in range(3)]
        each.logs.set_plan([LogPlan(f"{rank}", orders[0][rank::2], orders[1][rank::2])
                            for rank in range(2)])  # fmt: skip
        each.logs.settle()
        for begin in range(0, len(orders[0]), 100):
            list(each.reader.batches(orders[0][begin : begin + 100]))
        store.reads.clear()
        each.logs.set_plan([LogPlan(f"{rank}", orders[1][rank::2], orders[2][rank::2])
                            for rank in range(2)])  # fmt: skip
        each.logs.settle()
        before = each.logs.stats()["log_reads"]
        for begin in range(0, len(orders[1]), 20):
            unit = orders[1][begin : begin + 20]
            each.reader.prefetch([unit[::2], unit[1::2]])
            list(each.reader.batches(unit[::2]))
            list(each.reader.batches(unit[1::2]))
        assert sum(size for _, _, size in store.reads) <= LARGE * 1.1
        assert each.logs.stats()["log_reads"] - before <= TOTAL // SEGMENT + 6


def test_segments_that_are_not_asked_for_do_not_end_reading_ahead(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    """The mount may have all files of a segment that it has announced. The later ones are read
    ahead all the same: they are in memory when they are asked for."""
    with job(view, store, tmp_path / "c") as each:
        orders = [each.order(seed) for seed in range(3)]
        each.epoch(orders[0], orders[1])
        each.logs.set_plan([LogPlan("train", orders[1], orders[2])])
        each.logs.settle()
        entries = orders[1][
            np.isin(orders[1], view.files()[view.columns.size[view.files()] < 9000])
        ]
        for begin in range(0, 600, 20):  # announced, and never read
            each.reader.prefetch([entries[begin : begin + 20]])
        before = each.logs.stats()["log_reads"]
        each.reader.prefetch([entries[1000:1020]])
        assert each.logs.stats()["log_reads"] > before


@pytest.mark.parametrize("part", [0.0, 0.3, 0.98, 1.0])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_log_is_used_again_by_the_next_process(
    view: Snapshot, store: Counting, tmp_path: Path, part: float, how: str
) -> None:
    """After a kill at any moment of the epoch, or an orderly end. What was written is not read from
    the store again; what was staged is."""
    one = Job(view, store, tmp_path / "c")
    one.epoch(one.order(0), one.order(1))
    one.epoch(one.order(1), one.order(2), part=part)
    one.kill() if how == "kill" else one.close()
    with job(view, store, tmp_path / "c") as other:
        from_store = other.epoch(other.order(1), other.order(2))
        assert other.logs.stats()["log_recovered"] >= 1
        # Segments that were released are in the log of the next epoch
        assert from_store <= LARGE * 1.1 + (STAGED * 2 if how == "kill" else 0)
        assert other.epoch(other.order(2), other.order(3)) <= LARGE * 1.1


def test_what_a_crash_has_left_is_never_believed(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    """Random bytes, holes and cut ends in both logs, as after a power cut."""
    rng = np.random.default_rng(3)
    for trial in range(8):
        one = Job(view, store, tmp_path / f"c{trial}")
        one.epoch(one.order(0), one.order(1))
        one.epoch(one.order(1), one.order(2), part=0.5)
        one.kill()
        for path in (tmp_path / f"c{trial}").glob("*/*/order-*"):
            size = path.stat().st_size
            with open(path, "r+b") as file:
                for _ in range(40):
                    file.seek(int(rng.integers(size)))
                    file.write(rng.bytes(int(rng.integers(1, 9000))) if trial % 2 else bytes(5000))
                file.truncate(int(size * (0.7 if trial % 3 == 0 else 1)))
        with job(view, store, tmp_path / f"c{trial}") as other:
            other.epoch(other.order(1), other.order(2))  # it checks each byte
            assert other.logs.stats()["log_wrong"] > 0
            assert other.epoch(other.order(2), other.order(3)) <= LARGE * 1.1


def test_what_is_released_while_it_is_read_is_not_called_damaged(
    view: Snapshot, store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reader of an order has passed a segment that is wanted again, and its room is given back
    between the look into the index and the read."""
    hold, read_once = threading.Event(), order_log._read_once

    made = job(view, store, tmp_path / "c", 8 * TOTAL, staged=2 * TOTAL)
    with made as each, caplog.at_level(logging.WARNING):
        orders = [each.order(seed) for seed in range(3)]
        each.epoch(orders[0], orders[1])
        each.logs.set_plan([LogPlan("train", orders[1], orders[2])])
        each.logs.settle()

        def late(file: int, start: int, size: int) -> memoryview:
            hold.set()
            until(lambda: each.logs.stats()["log_released_bytes"], "the room")
            return read_once(file, start, size)

        each.logs._thread.submit(hold.wait)  # what releases segments is busy
        for _ in range(TOTAL // SEGMENT + 3):
            each.logs.passed("train", len(orders[1]))
        each.logs.flush()
        monkeypatch.setattr(order_log, "_read_once", late)
        for batch in each.reader.batches(orders[1][:20]):
            for entry, start, content in zip(*batch, strict=True):
                whole = each.content[int(entry)]
                assert content == whole[int(start) : int(start) + len(content)]
        assert hold.is_set()
        assert each.logs.stats()["log_wrong"] == 0
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("left_segments", [0, 5])
def test_what_only_the_reader_has_read_comes_to_the_next_log(
    view: Snapshot, store: Counting, tmp_path: Path, left_segments: int
) -> None:
    """A reader that outruns the mount passes segments that the mount has not read; the last ones
    are still there when it goes on to the next epoch."""
    with job(view, store, tmp_path / "c") as each:
        orders = [each.order(seed) for seed in range(4)]
        each.epoch(orders[0], orders[1])
        each.logs.set_plan([LogPlan("train", orders[1], orders[2])])
        each.logs.settle()
        end = len(orders[1]) * (60 - left_segments) // 60 if left_segments else len(orders[1])
        for _ in range(TOTAL // SEGMENT + 3):
            each.logs.passed("train", end)
        assert each.epoch(orders[2], orders[3]) <= LARGE * 1.1


def test_an_order_that_is_given_up_is_not_read_to_its_end(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    with job(view, store, tmp_path / "c") as each:
        orders = [each.order(seed) for seed in range(4)]
        each.epoch(orders[0], orders[1])
        each.logs.set_plan([LogPlan("train", orders[1], orders[2])])
        each.logs.settle()
        before = each.logs.stats()["log_reads"]
        each.logs.set_plan([LogPlan("train", orders[2], orders[3])])
        assert each.logs.stats()["log_reads"] == before
        each.logs.settle()


def test_damage_of_a_living_log_is_said_once_and_read_from_the_store(
    view: Snapshot, store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job(view, store, tmp_path / "c") as each:
        each.epoch(each.order(0), each.order(1))
        [path] = (tmp_path / "c").glob("*/*/order-*")
        content = bytearray(path.read_bytes())
        content[::20_000] = bytes(255 - byte for byte in content[::20_000])
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            each.epoch(each.order(1), each.order(2))
        assert sum("are damaged" in record.message for record in caplog.records) == 1


def test_logs_of_other_orders_and_versions_are_put_aside(
    view: Snapshot, store: Counting, repository: LocalRepository, tmp_path: Path
) -> None:
    """They are not read, and removed when their room is needed."""
    limit = TOTAL * 6 // 5 + 2 * STAGED + 2 * SEGMENT
    with job(view, store, tmp_path / "c", limit) as one:
        one.epoch(one.order(0), one.order(1))
    [old] = (tmp_path / "c").glob("*/*/order-*")
    with job(view, store, tmp_path / "c", limit) as other:
        other.epoch(other.order(20), other.order(21))
        assert other.logs.stats()["log_hits"] == 0
        assert other.logs.stats()["log_refused"] == 0
        assert other.epoch(other.order(21), other.order(22)) <= LARGE * 1.1
    assert len([*(tmp_path / "c").glob("*/*/order-*")]) == 1
    assert not old.exists()


def test_a_second_mount_of_the_same_order_goes_without(
    view: Snapshot, store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job(view, store, tmp_path / "c") as one, job(view, store, tmp_path / "c") as other:
        one.epoch(one.order(0), one.order(1))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                other.epoch(other.order(0), other.order(1))
        said = [record.message for record in caplog.records]
        assert sum("another mount uses" in message for message in said) == 1
        assert one.epoch(one.order(1), one.order(2)) <= LARGE * 1.1


def test_chunks_of_the_dataset_make_room_and_none_come(
    view: Snapshot, store: Counting, tmp_path: Path
) -> None:
    limit = TOTAL * 6 // 5 + 2 * STAGED + 2 * SEGMENT
    disk = DiskTier(prepare_cache_folder(tmp_path / "c"), STORE, limit)
    key = ChunkKey(view.identity, view.chunk_ids[0])
    reservation = disk.reserve(key, TOTAL)
    assert reservation is not None
    reservation.commit(memoryview(bytes(TOTAL)))
    with job(view, store, tmp_path / "c", limit) as each:
        with pytest.raises(NoSpaceError, match="order logs in place of chunks"):
            disk.reserve(ChunkKey(view.identity, view.chunk_ids[1]), 100)
        each.epoch(each.order(0), each.order(1))
        assert not disk.holds(key)
        assert each.epoch(each.order(1), each.order(2)) <= LARGE * 1.1
    second = disk.reserve(ChunkKey(view.identity, view.chunk_ids[1]), 100)
    assert second is not None  # no log is in use any more
    second.cancel()


def test_a_file_system_that_cannot_punch(
    view: Snapshot, store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It works, in half of the room, and says so once. (The error is injected: the kernel of a test
    machine may have no file system without holes.)"""

    def refuse(file: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(order_log, "punch_hole", refuse)
    limit = TOTAL * 6 // 5 + 2 * STAGED + 2 * SEGMENT
    with job(view, store, tmp_path / "c", limit) as each, caplog.at_level(logging.WARNING):
        for number in range(3):
            each.epoch(each.order(number), each.order(number + 1))
            assert each.on_disk() <= limit
        hits = each.logs.stats()["log_hit_bytes"] / 2 / TOTAL
    assert 0.4 < hits < 0.55
    assert sum("cannot release parts of a file" in each.message for each in caplog.records) == 1


def test_a_full_disk_and_a_read_only_one(
    view: Snapshot, store: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", f"size={TOTAL // 3}") as disk:
        with job(view, store, disk / "c") as each, caplog.at_level(logging.WARNING):
            for number in range(3):
                each.epoch(each.order(number), each.order(number + 1))
            assert each.logs.stats()["log_hits"] > 0
        assert any("order log is full" in each.message for each in caplog.records)
        remount(disk, "ro")
        with pytest.raises(OSError, match="Read-only"):
            Job(view, store, disk / "c")
        remount(disk, "rw")


KILL_POINTS = ["header", "content", "between runs", "sync", "switch", "punch", "remove"]


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_at_each_step_of_a_logs_life_loses_no_byte(
    view: Snapshot, store: Counting, tmp_path: Path, point: str
) -> None:
    """A process is killed (SIGKILL) in the middle of that step, in its third call; the next process
    reads everything right, and most of it from what is there."""
    child = os.fork()
    if not child:
        try:
            _die_at(point)
            one = Job(view, store, tmp_path / "c")
            for number in range(4):
                one.epoch(one.order(number), one.order(number + 1))
            one.close()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the step was not reached"
    assert os.WTERMSIG(status) == signal.SIGKILL
    with job(view, store, tmp_path / "c") as other:
        for number in range(4):
            other.epoch(other.order(number), other.order(number + 1))
        assert other.epoch(other.order(4), other.order(5)) <= LARGE * 1.1


def _die_at(point: str) -> None:
    """Kill this process in the middle of a step."""
    calls = 0
    original_write, original_punch = os.pwrite, punch_hole

    def now() -> bool:
        nonlocal calls
        calls += 1
        return calls == 3

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(file: int, content: memoryview, start: int) -> int:
        is_header = bytes(content[:8]) == b"DSLORDER"
        if point in ("header", "content") and is_header == (point == "header") and now():
            original_write(file, content[: len(content) // 2], start)
            die()
        done = original_write(file, content, start)
        if point == "between runs" and not is_header and now():
            die()
        return done

    def punch(file: int, start: int, size: int) -> None:
        if point == "punch" and now():
            original_punch(file, start, 4096)
            die()
        original_punch(file, start, size)

    def before(name: str, original: Callable[Given, Made]) -> Callable[Given, Made]:
        def call(*args: Given.args, **named: Given.kwargs) -> Made:
            if name == point:
                die()
            return original(*args, **named)

        return call

    patch = pytest.MonkeyPatch()  # the process ends with it
    patch.setattr(os, "pwrite", pwrite)
    patch.setattr(order_log, "punch_hole", punch)
    patch.setattr(os, "fdatasync", before("sync", os.fdatasync))
    patch.setattr(DiskTier, "remove_log", before("remove", DiskTier.remove_log))
    change = OrderLogs._change_logs

    def switched(self: OrderLogs, gone: Sequence[object], *rest: object) -> None:
        if point == "switch" and gone:
            die()
        change(self, gone, *rest)  # type: ignore[arg-type]  # handed on as they came

    patch.setattr(OrderLogs, "_change_logs", switched)

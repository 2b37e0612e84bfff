"""Order logs: contents that were read come back from the disk in the order of the next epoch."""

import errno
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from diesel_fs.cache.disk.folder import CacheFolder
from diesel_fs.cache.disk.logs import OrderLogFiles
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.order_logs import maker, segments, writer
from diesel_fs.cache.order_logs.log_set import read_once
from diesel_fs.cache.order_logs.logs import LoggedReader, OrderLogs, is_log_worthwhile
from diesel_fs.cache.order_logs.streams import LogPlan
from diesel_fs.cache.order_logs.writer import LogWriter
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.cache.tiers import ChunkKey
from diesel_fs.errors import NoSpaceError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.plan import Entries
from diesel_fs.repository.local import LocalRepository
from diesel_fs.system.syscalls import punch_hole
from tests.rows import each_row
from tests.waiting import until

from ..small_disks import remount, small_disk
from .conftest import Counting, put_files
from .disk_tier import STORE, put, tier_at

Words = Callable[[str], int]
Given = ParamSpec("Given")
Made = TypeVar("Made")

FILES = {f"{i % 7}/f{i:04}": os.urandom(500 + 7 * i % 4000) for i in range(1500)} | {
    "large": os.urandom(2 * CHUNK_BYTES_MIN + 5),
    "empty": b"",
    "text": b"words " * 3000,
}
TOTAL = sum(map(len, FILES.values()))
LARGE = len(FILES["large"])
"""Files of several extents are in no log."""
SEGMENT, STAGED = 64 << 10, 128 << 10
SEGMENTS = TOTAL // SEGMENT + 3
NEARLY_TOTAL = TOTAL * 6 // 5 + 2 * STAGED + 2 * SEGMENT
"""Room for one epoch, and for the part of the next that is written while this one is read."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder = tmp_path_factory.mktemp("logs")
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        put_files(opened, "ds", folder / "source", FILES, "lz4")
        yield opened


class Job:
    """A reader of epochs through order logs, which checks every byte. An order is named by its
    seed."""

    def __init__(
        self,
        view: Snapshot,
        store: Counting,
        place: Path,
        limit: int = 4 * TOTAL,
        staged: int = STAGED,
    ) -> None:
        self.view, self.store, self.place = view, store, place
        folder = CacheFolder(prepare_cache_folder(place), STORE, limit)
        log_files = OrderLogFiles(folder, view.identity)
        self.logs = OrderLogs(view, log_files, staged_bytes=staged, segment_bytes=SEGMENT)
        self.reader = LoggedReader(CoalescingReader(view, store), self.logs)
        self.content = {view.lookup(name.encode()): content for name, content in FILES.items()}
        files = view.files()
        files = files[view.columns.size[files] > 0]
        self.order: Callable[[int], Entries] = cache(
            lambda seed: np.random.default_rng(seed).permutation(files).astype(np.uint32)
        )
        self.has_ended = False

    def begin(self, current: int, following: int | None) -> None:
        """Announce an epoch, and the next one if it is known."""
        coming = None if following is None else self.order(following)
        self.logs.set_plan([LogPlan("train", self.order(current), coming)])
        self.logs.settle()

    def epoch(
        self, current: int, following: int | None, *, read: int | None = None, part: float = 1.0
    ) -> int:
        """Read an epoch (`part` of it, or another); returns the bytes read from the store."""
        before = self.store.bytes_read()
        self.begin(current, following)
        wanted = self.order(current if read is None else read)
        for begin in range(0, int(part * len(wanted)), 20):
            some = wanted[begin : begin + 20]
            self.reader.prefetch([some, wanted[begin + 20 : begin + 40]])
            self.check(some)
            if read is None:
                self.logs.passed("train", begin)
        self.logs.settle()
        return self.store.bytes_read() - before

    def check(self, entries: Entries) -> None:
        """Read some files and compare them."""
        found = {entry: bytearray(len(self.content[entry])) for entry in entries.tolist()}
        read = 0
        for batch in self.reader.batches(entries):
            for entry, start, content in zip(*batch, strict=True):
                found[int(entry)][start : start + len(content)] = content
                read += len(content)
        assert found == {entry: self.content[entry] for entry in found}
        assert read == sum(map(len, found.values()))

    def epoch_from_disk(self, current: int, following: int | None) -> None:
        """Read an epoch of which only the large file comes from the store."""
        assert self.epoch(current, following) <= LARGE * 1.1

    def pass_all(self, position: int) -> None:
        """The mount has got to a position, in as many calls as release all segments before it."""
        for _ in range(SEGMENTS):
            self.logs.passed("train", position)

    def files(self) -> list[Path]:
        return [*self.place.glob("*/*/order-*")]

    def kill(self) -> None:
        """End as a killed process does: staged files are lost, all locks are free."""
        self.has_ended = True
        self.logs._writer._thread.shutdown(wait=True, cancel_futures=True)
        for each in self.logs._set.by_order.values():
            os.close(each.file)
        self.logs._writer._files.close()

    def close(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.reader.close()


class Jobs:
    """Starts jobs, which end with the test at the latest."""

    def __init__(self, view: Snapshot, store: Counting, place: Path, ends: ExitStack) -> None:
        self.view, self.store, self.place, self.ends = view, store, place, ends

    def start(
        self, limit: int = 4 * TOTAL, *, staged: int = STAGED, place: Path | None = None
    ) -> Job:
        job = Job(self.view, self.store, place or self.place, limit, staged)
        self.ends.callback(job.close)
        return job


@pytest.fixture
def jobs(view: Snapshot, store: Counting, tmp_path: Path) -> Iterator[Jobs]:
    with ExitStack() as ends:
        yield Jobs(view, store, tmp_path / "c", ends)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    return jobs.start()


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Words:
    """How often a warning with these words was logged."""
    caplog.set_level(logging.WARNING)
    return lambda words: sum(words in record.message for record in caplog.records)


def test_after_the_first_epoch_nothing_comes_from_the_store(jobs: Jobs) -> None:
    """And both logs together never need the room of two."""
    job = jobs.start(TOTAL * 3 // 2)
    assert job.epoch(0, 1) >= TOTAL / 2  # the store has it compressed
    for number in range(1, 4):
        job.epoch_from_disk(number, number + 1)
        assert job.logs.stats()["log_bytes"] < TOTAL * 1.2
    stats = job.logs.stats()
    assert stats["log_wrong"] == stats["log_refused"] == 0
    # One read a segment, as all of it is wanted at once
    assert stats["log_reads"] <= 3 * SEGMENTS
    assert stats["log_written_bytes"] <= 4 * TOTAL * 1.05


def test_a_log_that_holds_half_spares_half_of_the_reads(jobs: Jobs) -> None:
    """The first half of each epoch, which is there when it begins."""
    room = TOTAL // 2 + 2 * STAGED + 2 * SEGMENT
    job = jobs.start(room)
    job.epoch(0, 1)
    for number in (1, 2):
        job.epoch(number, number + 1)
        assert job.logs.stats()["log_bytes"] <= room
    assert 0.42 < job.logs.stats()["log_hit_bytes"] / 2 / TOTAL < 0.52
    assert job.logs.stats()["log_refused"] == 0


def test_an_unknown_next_order_is_read_entry_by_entry(job: Job, warned: Words) -> None:
    """Which is nothing to warn of."""
    job.epoch(0, None)
    for number, following in ((1, None), (2, None), (3, None), (9, 10), (10, None)):
        job.epoch_from_disk(number, following)
    assert warned("") == 0


def test_the_same_order_each_epoch_is_written_once(job: Job) -> None:
    job.epoch(1, 1)
    written = job.logs.stats()["log_written_bytes"]
    for _ in range(2):
        job.epoch_from_disk(1, 1)
    assert job.logs.stats()["log_written_bytes"] == written


def test_a_reader_that_leaves_its_order_gets_the_right_bytes(job: Job) -> None:
    job.epoch(0, 1)
    job.epoch(1, 2, read=5)
    job.epoch_from_disk(7, 8)  # the next epoch is another than was announced


def test_two_streams_share_the_disk(job: Job) -> None:
    """Two ranks: files that one reads are written for the epoch of the other. Each segment is read
    once, though the ranks read in turns."""

    def announce(current: Entries, following: Entries) -> None:
        job.logs.set_plan(
            [LogPlan(f"{rank}", current[rank::2], following[rank::2]) for rank in range(2)]
        )
        job.logs.settle()

    orders = [job.order(seed) for seed in range(3)]
    announce(orders[0], orders[1])
    for begin in range(0, len(orders[0]), 100):
        list(job.reader.batches(orders[0][begin : begin + 100]))
    job.store.reads.clear()
    announce(orders[1], orders[2])
    before = job.logs.stats()["log_reads"]
    for begin in range(0, len(orders[1]), 20):
        unit = orders[1][begin : begin + 20]
        job.reader.prefetch([unit[::2], unit[1::2]])
        list(job.reader.batches(unit[::2]))
        list(job.reader.batches(unit[1::2]))
    assert job.store.bytes_read() <= LARGE * 1.1
    assert job.logs.stats()["log_reads"] - before <= SEGMENTS + 3


def test_segments_that_nobody_reads_do_not_end_reading_ahead(job: Job) -> None:
    """The mount may have all files of a segment that it has announced. The later ones are read
    ahead all the same: they are in memory when they are wanted."""
    job.epoch(0, 1)
    job.begin(1, 2)
    entries = job.order(1)[job.view.columns.size[job.order(1)] < 9000]
    for begin in range(0, 600, 20):  # announced, and never read
        job.reader.prefetch([entries[begin : begin + 20]])
    before = job.logs.stats()["log_reads"]
    job.reader.prefetch([entries[1000:1020]])
    assert job.logs.stats()["log_reads"] > before


@pytest.mark.parametrize("part", [0.0, 0.3, 0.98, 1.0])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_log_is_used_again_by_the_next_process(jobs: Jobs, part: float, how: str) -> None:
    """After a kill at any moment of the epoch, or an orderly end. Files that were written are not
    read from the store again; files that were staged are."""
    one = jobs.start()
    one.epoch(0, 1)
    one.epoch(1, 2, part=part)
    one.kill() if how == "kill" else one.close()
    other = jobs.start()
    # Segments that were released are in the log of the next epoch
    assert other.epoch(1, 2) <= LARGE * 1.1 + (STAGED * 2 if how == "kill" else 0)
    assert other.logs.stats()["log_recovered"] >= 1
    other.epoch_from_disk(2, 3)


def test_contents_that_a_crash_has_left_are_checked(jobs: Jobs) -> None:
    """Random bytes, holes and cut ends in both logs, as after a power cut."""
    rng = np.random.default_rng(3)
    for trial in range(8):
        place = jobs.place.with_name(f"c{trial}")
        one = jobs.start(place=place)
        one.epoch(0, 1)
        one.epoch(1, 2, part=0.5)
        one.kill()
        for path in one.files():
            size = path.stat().st_size
            with open(path, "r+b") as file:
                for _ in range(40):
                    file.seek(int(rng.integers(size)))
                    file.write(rng.bytes(int(rng.integers(1, 9000))) if trial % 2 else bytes(5000))
                file.truncate(int(size * (0.7 if trial % 3 == 0 else 1)))
        other = jobs.start(place=place)
        other.epoch(1, 2)  # it checks each byte
        assert other.logs.stats()["log_wrong"] > 0
        other.epoch_from_disk(2, 3)
        other.close()


def test_a_segment_that_is_released_while_it_is_read_is_not_damaged(
    jobs: Jobs, warned: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of an order has passed a segment that is wanted again, and its room is given back
    between the look into the index and the read."""
    hold = threading.Event()
    job = jobs.start(8 * TOTAL, staged=2 * TOTAL)
    job.epoch(0, 1)
    job.begin(1, 2)

    def late(file: int, start: int, size: int) -> memoryview:
        hold.set()
        until(lambda: job.logs.stats()["log_released_bytes"], "the room")
        return read_once(file, start, size)

    job.logs._writer._thread.submit(hold.wait)  # what releases segments is busy
    job.pass_all(len(job.order(1)))
    job.logs.flush()
    monkeypatch.setattr(segments, "read_once", late)
    job.check(job.order(1)[:20])
    assert hold.is_set()
    assert job.logs.stats()["log_wrong"] == warned("damaged") == 0


@pytest.mark.parametrize("left_segments", [0, 5])
def test_files_that_only_the_reader_has_read_come_to_the_next_log(
    job: Job, left_segments: int
) -> None:
    """A reader that outruns the mount passes segments that the mount has not read; the last ones
    are still there when it goes on to the next epoch."""
    job.epoch(0, 1)
    job.begin(1, 2)
    job.pass_all(len(job.order(1)) * (60 - left_segments) // 60)
    job.epoch_from_disk(2, 3)


def test_an_order_that_is_given_up_is_not_read_to_its_end(job: Job) -> None:
    job.epoch(0, 1)
    job.begin(1, 2)
    before = job.logs.stats()["log_reads"]
    job.begin(2, 3)
    assert job.logs.stats()["log_reads"] == before


def test_damage_of_a_living_log_is_logged_once_and_read_from_the_store(
    job: Job, warned: Words
) -> None:
    job.epoch(0, 1)
    [path] = job.files()
    content = bytearray(path.read_bytes())
    content[::20_000] = bytes(255 - byte for byte in content[::20_000])
    path.write_bytes(content)
    job.epoch(1, 2)
    assert warned("are damaged") == 1


def test_an_order_that_was_not_foreseen_is_known_when_it_begins(jobs: Jobs) -> None:
    """As that of a script's second epoch: the log is then rewritten for it, in few reads, and in
    the room of one log."""
    job = jobs.start(NEARLY_TOTAL)
    job.epoch(0, None)
    job.begin(1, None)
    before = job.logs.stats()["log_reads"]
    job.epoch_from_disk(1, 2)
    assert job.logs.stats()["log_reads"] - before < 3 * SEGMENTS
    job.epoch_from_disk(2, 3)
    assert job.logs.stats()["log_refused"] == 0
    assert len(job.files()) == 1 + 1  # of this epoch, and of the next one


def test_half_a_log_is_rewritten_for_an_unforeseen_order(jobs: Jobs) -> None:
    """What it has is half of the next epoch, too, and makes room for the half after that."""
    room = TOTAL // 2 + 2 * STAGED + 2 * SEGMENT
    job = jobs.start(room)
    job.epoch(0, None)
    for number in (1, 2):
        before = job.logs.stats()["log_hit_bytes"]
        job.epoch(number, number + 1)
        assert 0.42 < (job.logs.stats()["log_hit_bytes"] - before) / TOTAL < 0.52
        assert job.logs.stats()["log_bytes"] <= room
    assert job.logs.stats()["log_refused"] == 0


def test_a_reader_may_be_anywhere_when_a_log_is_rewritten_for_it(job: Job) -> None:
    """Files that it reads meanwhile come from either log, and those that it has passed come to the
    next one."""
    job.epoch(0, None)
    job.logs.set_plan([LogPlan("train", job.order(1), job.order(2))])
    wanted = job.order(1)
    before = job.store.bytes_read()
    for begin in range(0, len(wanted), 20):
        job.check(wanted[begin : begin + 20])
        job.logs.passed("train", begin)
    job.logs.settle()
    assert job.store.bytes_read() - before <= LARGE * 1.1
    job.epoch_from_disk(2, 3)


@pytest.mark.parametrize("following", [None, 21])
def test_logs_of_other_orders_are_rewritten_for_a_new_process(
    jobs: Jobs, following: int | None
) -> None:
    """Whether it knows its next order or not. The room is that of one log."""
    one = jobs.start(NEARLY_TOTAL)
    one.epoch(0, 1)
    one.epoch(1, 2, part=0.4)
    one.close()
    other = jobs.start(NEARLY_TOTAL)
    other.epoch_from_disk(20, following)
    other.epoch_from_disk(21, 22)
    assert other.logs.stats()["log_refused"] == 0
    other.close()
    assert len(other.files()) == 1


def test_a_rewritten_log_that_is_read_again_stays_as_it_is(jobs: Jobs) -> None:
    """Half of the files, in the order in which another process reads them again."""
    room = TOTAL // 2 + 2 * STAGED + 2 * SEGMENT
    one = jobs.start(room)
    one.epoch(0, None)
    one.begin(1, 2)
    one.close()
    other = jobs.start(room)
    other.begin(1, 2)
    assert other.logs.stats()["log_rewritten"] == 0
    other.epoch(1, 2)
    assert other.logs.stats()["log_hit_bytes"] > 0.42 * TOTAL


def test_logs_of_other_versions_are_put_aside(tmp_path: Path) -> None:
    """They are not read, and removed when their room is needed."""
    with LocalRepository.open((tmp_path / "store").as_uri(), create=True) as repository:
        store, place = Counting(repository), tmp_path / "c"
        view = put_files(repository, "ds", tmp_path / "source", FILES, "lz4")
        with closing(Job(view, store, place, NEARLY_TOTAL)) as one:
            one.epoch(0, 1)
        [old] = one.files()
        view = put_files(repository, "ds", tmp_path / "source", {"0/f0000": b"new"}, "lz4")
        with closing(Job(view, store, place, NEARLY_TOTAL)) as other:
            other.content[view.lookup(b"0/f0000")] = b"new"
            other.epoch(20, 21)
            assert other.logs.stats()["log_hits"] == other.logs.stats()["log_refused"] == 0
            other.epoch_from_disk(21, 22)
    assert len(other.files()) == 1
    assert not old.exists()


@each_row("memory_bytes, file_bytes_max, pays", [
    (0, TOTAL, True), (TOTAL - 1, TOTAL // 1000, True), (TOTAL, TOTAL, False),
    (0, TOTAL // (len(FILES) - 1) + 1, True), (0, TOTAL // (len(FILES) - 1), False),
])  # fmt: skip
def test_logs_pay_for_small_files_that_do_not_fit_the_memory(
    view: Snapshot, memory_bytes: int, file_bytes_max: int, pays: bool
) -> None:
    """The empty file does not count."""
    assert is_log_worthwhile(view, memory_bytes, file_bytes_max) == pays


def test_a_log_of_which_few_files_are_read_is_put_aside(jobs: Jobs) -> None:
    """A reader of other files may come for it."""
    with closing(jobs.start()) as one:
        one.epoch(0, 1)
    few = jobs.start()
    few.logs.set_plan([LogPlan("few", few.order(2)[:500].copy(), few.order(3)[:500].copy())])
    few.logs.settle()
    assert few.logs.stats()["log_rewritten"] == 0
    few.close()
    jobs.start().epoch_from_disk(3, 4)


def test_a_kill_while_a_log_is_rewritten_loses_no_byte(jobs: Jobs) -> None:
    """The next process reads everything right, and most of it from what both logs have."""
    child = os.fork()
    if not child:
        try:
            move, moved = LogWriter._move, count()

            def die(self: LogWriter, *arguments: object) -> None:
                if next(moved) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                move(self, *arguments)  # type: ignore[arg-type]  # handed on as they came

            pytest.MonkeyPatch().setattr(LogWriter, "_move", die)  # the process ends with it
            one = jobs.start(NEARLY_TOTAL)
            one.epoch(0, None)
            one.epoch(1, 2)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "nothing was rewritten"
    for seed in (5, 1):
        other = jobs.start(NEARLY_TOTAL)
        assert other.epoch(seed, seed + 1) <= LARGE * 1.1 + 2 * STAGED
        other.close()


def test_a_second_mount_of_the_same_order_goes_without(jobs: Jobs, warned: Words) -> None:
    one, other = jobs.start(), jobs.start()
    one.epoch(0, 1)
    for _ in range(2):
        other.epoch(0, 1)
    assert warned("another mount uses") == 1
    one.epoch_from_disk(1, 2)


def test_chunks_of_the_dataset_make_room_and_none_come(jobs: Jobs) -> None:
    disk = tier_at(prepare_cache_folder(jobs.place), NEARLY_TOTAL)
    key, other = (ChunkKey(jobs.view.identity, chunk) for chunk in jobs.view.chunk_ids[:2])
    put(disk, key, bytes(TOTAL))
    job = jobs.start(NEARLY_TOTAL)
    with pytest.raises(NoSpaceError, match="order logs in place of chunks"):
        disk.reserve(other, 100)
    job.epoch(0, 1)
    assert not disk.holds(key)
    job.epoch_from_disk(1, 2)
    job.close()
    put(disk, other, bytes(100))  # no log is in use any more


def test_a_file_system_that_cannot_punch(
    jobs: Jobs, warned: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works, in half of the room, and logs that once. (The error is injected: the kernel of a
    test machine may have no file system without holes.)"""

    def refuse(file: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(writer, "punch_hole", refuse)
    monkeypatch.setattr(maker, "punch_hole", refuse)
    job = jobs.start(NEARLY_TOTAL)
    for number in range(3):
        job.epoch(number, number + 1)
        assert job.logs.stats()["log_bytes"] <= NEARLY_TOTAL
    assert 0.4 < job.logs.stats()["log_hit_bytes"] / 2 / TOTAL < 0.55
    assert warned("cannot release parts of a file") == 1


def test_a_full_disk_and_a_read_only_one(jobs: Jobs, tmp_path: Path, warned: Words) -> None:
    with small_disk(tmp_path / "disk", f"size={TOTAL // 3}") as disk:
        job = jobs.start(place=disk / "c")
        for number in range(3):
            job.epoch(number, number + 1)
        assert job.logs.stats()["log_hits"] > 0
        job.close()
        assert warned("order log is full")
        remount(disk, "ro")
        with pytest.raises(OSError, match="Read-only"):
            jobs.start(place=disk / "c")
        remount(disk, "rw")


KILL_POINTS = ["header", "content", "between runs", "sync", "switch", "punch", "remove"]


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_at_each_step_of_a_logs_life_loses_no_byte(jobs: Jobs, point: str) -> None:
    """A process is killed (SIGKILL) in the middle of that step, in its third call; the next process
    reads everything right, and most of it from the log."""
    child = os.fork()
    if not child:
        try:
            _die_at(point)
            one = jobs.start()
            for number in range(4):
                one.epoch(number, number + 1)
            one.close()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the step was not reached"
    assert os.WTERMSIG(status) == signal.SIGKILL
    other = jobs.start()
    for number in range(4):
        other.epoch(number, number + 1)
    other.epoch_from_disk(4, 5)


def _die_at(point: str) -> None:
    """Kill this process in the middle of a step."""
    calls = 0
    original_write, original_punch = os.pwrite, punch_hole

    def now() -> bool:
        nonlocal calls
        calls += 1
        return calls == 3

    def pwrite(file: int, content: memoryview, start: int) -> int:
        is_header = bytes(content[:8]) == b"DSLORDER"
        if point in ("header", "content") and is_header == (point == "header") and now():
            original_write(file, content[: len(content) // 2], start)
            os.kill(os.getpid(), signal.SIGKILL)
        done = original_write(file, content, start)
        if point == "between runs" and not is_header and now():
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def punch(file: int, start: int, size: int) -> None:
        if point == "punch" and now():
            original_punch(file, start, 4096)
            os.kill(os.getpid(), signal.SIGKILL)
        original_punch(file, start, size)

    def before(name: str, original: Callable[Given, Made]) -> Callable[Given, Made]:
        def call(*args: Given.args, **named: Given.kwargs) -> Made:
            if name == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        return call

    patch = pytest.MonkeyPatch()  # the process ends with it
    patch.setattr(os, "pwrite", pwrite)
    patch.setattr(writer, "punch_hole", punch)
    patch.setattr(os, "fdatasync", before("sync", os.fdatasync))
    patch.setattr(OrderLogFiles, "remove", before("remove", OrderLogFiles.remove))
    patch.setattr(LogWriter, "_retire", before("switch", LogWriter._retire))

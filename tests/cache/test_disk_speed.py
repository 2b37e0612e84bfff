"""The speed of a cache folder's disk: measured once, kept in the folder, and never believed if it
is damaged.
"""

import errno
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from diesel_fs.cache.disk.speed import SPEED_FILE, DiskSpeed, disk_speed
from tests.examples import examples
from tests.rows import each_row

SPEED = DiskSpeed(10**8, 2 * 10**8, 2_000)


class Measures:
    """Stands in for a measurement, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, folder: str) -> DiskSpeed:
        self.count += 1
        return SPEED


def test_a_disk_is_measured_once(tmp_path: Path) -> None:
    """The bytes of the result are as the page says."""
    measure = Measures()
    for _ in range(3):
        assert disk_speed(str(tmp_path), measure) == SPEED
    assert measure.count == 1
    record = struct.pack("<8sIIQQQ", b"DSLSPEED", 1, 0, 10**8, 2 * 10**8, 2_000)
    content = (tmp_path / SPEED_FILE).read_bytes()
    assert content == record + struct.pack("<Q", xxh3_64_intdigest(record))


@examples(60)
@given(data=st.data())
def test_a_damaged_result_is_none(data: st.DataObject) -> None:
    content = bytearray(SPEED.packed())
    kind = data.draw(st.sampled_from(["bit", "cut", "longer"]))
    at = data.draw(st.integers(0, 8 * len(content) - 1))
    if kind == "bit":
        content[at // 8] ^= 1 << at % 8
    elif kind == "cut":
        del content[at // 8 :]
    else:
        content += b"x"
    assert DiskSpeed.parse(bytes(content)) is None


@each_row("content", [b"", SPEED.packed()[:20], bytes(48), DiskSpeed(1, 1, 0).packed()])
def test_a_result_that_is_no_result_is_measured_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SPEED_FILE).write_bytes(content)
    for _ in range(2):
        assert disk_speed(str(tmp_path), Measures()) == SPEED
    assert (tmp_path / SPEED_FILE).read_bytes() == SPEED.packed()


def test_others_wait_for_the_one_that_measures(tmp_path: Path) -> None:
    is_measuring, others_begin = threading.Event(), threading.Barrier(4)

    def measure(folder: str) -> DiskSpeed:
        is_measuring.set()
        others_begin.wait(30)
        return SPEED

    def ask() -> DiskSpeed | None:
        others_begin.wait(30)
        return disk_speed(str(tmp_path), fail)

    def fail(folder: str) -> DiskSpeed:
        raise AssertionError("it is measured already")

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(disk_speed, str(tmp_path), measure)
        assert is_measuring.wait(30)
        others = [threads.submit(ask) for _ in range(3)]
        assert [each.result() for each in (first, *others)] == [SPEED] * 4


def test_a_process_that_is_killed_while_it_measures_leaves_it_to_the_next(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        disk_speed(str(tmp_path), lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type, return-value]
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert disk_speed(str(tmp_path), Measures()) == SPEED


def test_a_disk_that_cannot_be_measured_is_tried_again(tmp_path: Path) -> None:
    def fail(folder: str) -> DiskSpeed:
        raise OSError(errno.ENOSPC, "no space")

    assert disk_speed(str(tmp_path), fail) is None
    assert disk_speed(str(tmp_path), Measures()) == SPEED
    assert disk_speed(str(tmp_path / "absent"), Measures()) is None


def test_a_real_disk_has_a_speed_and_keeps_nothing_else(tmp_path: Path) -> None:
    found = disk_speed(str(tmp_path))
    assert found is not None
    assert found == DiskSpeed.parse((tmp_path / SPEED_FILE).read_bytes())
    assert os.listdir(tmp_path) == [SPEED_FILE]


@each_row("speed, file_bytes", [
    (DiskSpeed(100_000_000, 100_000_000, 2_000), 25_000),  # a network disk
    (DiskSpeed(60_000_000, 120_000_000, 100), 400_000),  # a hard disk
    (DiskSpeed(10, 10, 1_000_000), 0),
])  # fmt: skip
def test_a_log_pays_up_to_the_size_at_which_single_reads_are_as_fast(
    speed: DiskSpeed, file_bytes: int
) -> None:
    assert speed.log_file_bytes_max == file_bytes

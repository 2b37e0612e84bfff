"""Loop devices that several processes and threads get at one moment, and give back."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from diesel_fs.system.loop_devices import open_loop_device
from tests.loop_devices import files_of_loop_devices, only_user_of_loop_devices
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

pytestmark = [
    needs_root,
    pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices here"),
]

KILLED = """if True:
    import os, signal
    from diesel_fs.system.loop_devices import open_loop_device
    open_loop_device(os.memfd_create("of-killed"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with only_user_of_loop_devices():
        yield


def memory_file(name: str, content: bytes) -> int:
    file = os.memfd_create(name)
    os.pwrite(file, content, 0)
    return file


def test_a_device_shows_the_file_is_read_only_and_goes_with_its_last_user() -> None:
    file = memory_file("loop-test", b"content" * 1000)
    device = open_loop_device(file)
    os.close(file)
    assert os.pread(device, 14, 7 * 512) == b"content" * 2
    with pytest.raises(PermissionError), open(f"/proc/self/fd/{device}", "wb", 0) as writable:
        writable.write(bytes(512))
    assert any("loop-test" in name for name in files_of_loop_devices())
    os.close(device)
    wait_until(lambda: not any("loop-test" in name for name in files_of_loop_devices()))


def test_threads_that_want_one_at_the_same_moment_get_different_ones() -> None:
    """The kernel offers the same free device to all of them."""
    files = [memory_file("many", b"%09d" % number * 512) for number in range(24)]
    with ThreadPoolExecutor(len(files)) as pool:
        devices = list(pool.map(open_loop_device, files))
    try:
        assert [os.pread(each, 9, 0) for each in devices] == [
            b"%09d" % number for number in range(len(files))
        ]
        assert len({os.fstat(each).st_rdev for each in devices}) == len(files)
    finally:
        for each in (*files, *devices):
            os.close(each)


def test_a_killed_process_leaves_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert done.returncode == -9
    wait_until(lambda: not any("of-killed" in name for name in files_of_loop_devices()))

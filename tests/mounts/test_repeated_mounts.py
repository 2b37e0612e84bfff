"""Mounting, reading and unmounting many times leaves nothing behind.

`DIESEL_ROUNDS=1000` sets the number of rounds; a few show most leaks.
"""

import faulthandler
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.mounts import mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import children_of, daemon_of
from diesel_fs.settings import runtime_folder
from tests.mounts.conftest import PROGRAM, request_for
from tests.processes import command_lines

pytestmark = pytest.mark.fuse

ROUNDS = int(os.environ.get("DIESEL_ROUNDS", "20"))

HANG_S = 300.0


def resources_of(place: Path) -> Iterator[str]:
    for pid, command in command_lines():
        if os.fsencode(place) in command:
            yield f"process {pid} {command!r}"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if str(place) in line:
            yield f"mount {line}"
    for descriptor in os.listdir("/proc/self/fd"):
        yield f"descriptor {descriptor}"
    for thread in threading.enumerate():
        yield f"thread {thread.name}"
    for name in os.listdir("/dev/shm"):
        if "diesel" in name:
            yield f"shared memory {name}"
    for loop in Path("/sys/block").glob("loop*/loop/backing_file"):
        if str(place) in (file := loop.read_text()):
            yield f"loop device {loop} of {file}"
    for name in os.listdir(runtime_folder()):
        yield f"in the runtime folder {name}"


@pytest.mark.deep
@pytest.mark.only_session("native", "kernel")
def test_many_rounds_leave_nothing_behind(source: Path, tmp_path: Path, session: str) -> None:
    at = tmp_path / "mount"
    at.mkdir()
    request = request_for(source, at, session, policy="oneshot")
    before = set(resources_of(tmp_path))
    devices = set()
    for number in range(1, ROUNDS + 1):
        mount(request, program=PROGRAM)
        found = mounted_at(str(at))
        assert found is not None
        devices.add(found.device)
        daemon = daemon_of(found.device)
        assert daemon is not None
        assert len(children_of(daemon)) == 2
        assert (at / "a").read_bytes() == b"alpha" * 1000
        assert (at / "b").read_bytes() == b"beta"
        umount(at)
        assert os.listdir(at) == []
        if number % 100 == 0:  # a thousand rounds take longer than the limit of a test
            faulthandler.dump_traceback_later(HANG_S, exit=True)
    assert not set(resources_of(tmp_path)) - before
    # Other mounts may have got one of these device numbers since, but those are mounted.
    connections = Path("/sys/fs/fuse/connections")
    left = {f"0:{name}" for name in os.listdir(connections)} if connections.is_dir() else set()
    mounted = {line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert not (left & devices) - mounted

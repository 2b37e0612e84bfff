"""A native mount whose server stops or dies, or whose image is spoilt: no reader hangs, resident
files (those in the kernel's page cache) stay readable, and the kernel logs no complaint."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from diesel_fs.mounts import mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import ends_within
from tests.format.image.kernel import silence
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.folder_daemon import WATCHDOG
from tests.mounts.observed import Processes, locked_in_memory, log_of, noise, waiting_reads
from tests.waiting import wait_until

# These tests read the kernel's log.
pytestmark = [pytest.mark.deep, pytest.mark.fuse, pytest.mark.alone]

FILES = 1500
FILE_BYTES = 20_000
RESIDENT = range(50)
CALL_S = 30.0  # no call may take longer; those that hang are killed

# Calls each function on each path, and prints the errno, or "" for success. A spoilt image may give
# a file any size, so that a read to its end would take minutes.
TRY = f"""if True:
    import errno, json, os, sys
    def read(path):
        with open(path, "rb", buffering=0) as file:
            file.read({2 * FILE_BYTES})
    calls = {{"read": read, "stat": os.stat, "list": os.listdir, "statfs": os.statvfs}}
    for name, path in json.loads(sys.argv[1]):
        try:
            calls[name](path)
            print()
        except OSError as error:
            print(errno.errorcode.get(error.errno, error.errno))
"""


def content_of(number: int) -> bytes:
    return noise(number, FILE_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "folder").mkdir(parents=True)
    for number in range(FILES):
        (folder / "folder" / f"{number:05}").write_bytes(content_of(number))
    (folder / "wait").write_bytes(b"w" * 3000)
    return folder


def path_of(mounted: LiveMount, number: int) -> Path:
    return mounted.at / "folder" / f"{number:05}"


def read_resident(mounted: LiveMount) -> None:
    for number in RESIDENT:
        assert path_of(mounted, number).read_bytes() == content_of(number)


def resident_paths(mounted: LiveMount) -> list[Path]:
    return [path_of(mounted, number) for number in RESIDENT]


def outcomes(*calls: tuple[str, Path]) -> list[str]:
    arguments = json.dumps([(name, str(path)) for name, path in calls])
    command = [sys.executable, "-I", "-S", "-c", TRY, arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=CALL_S)
    return done.stdout.split("\n")[:-1]


@pytest.fixture
def unpushed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveMount, int]]:
    """A native mount with some resident files, whose server may not answer for 3 s."""
    monkeypatch.setenv(WATCHDOG, "3")
    with mounting(source, tmp_path / "mount", "native", memory_bytes=1) as mounted:
        read_resident(mounted)
        yield mounted, Processes.of(mounted.at).server


def test_a_stopped_server_lets_resident_files_be_read(unpushed: tuple[LiveMount, int]) -> None:
    """The watchdog ends the server; then other reads get an error."""
    mounted, server = unpushed
    with silence(), locked_in_memory(*resident_paths(mounted)):
        os.kill(server, signal.SIGSTOP)
        read_resident(mounted)
        assert len(os.listdir(mounted.at / "folder")) == FILES
        assert sum(entry.stat().st_size for entry in os.scandir(mounted.at / "folder")) > 0
        assert not (mounted.at / "no such name").exists()
        [cold] = outcomes(("read", path_of(mounted, FILES - 1)))
        assert cold != ""
        assert "has not answered for 3 s" in log_of(mounted)
        read_resident(mounted)


@pytest.mark.parametrize("victim", ["server", "supervisor", "all"])
def test_resident_files_outlive_the_processes(unpushed: tuple[LiveMount, int], victim: str) -> None:
    mounted, server = unpushed
    pids = {"server": [server], "supervisor": [mounted.pid], "all": [mounted.pid, server]}[victim]
    with silence():
        command = [sys.executable, "-I", "-S", "-c", TRY]
        arguments = json.dumps([("read", str(mounted.at / "wait"))])
        waiting = subprocess.Popen([*command, arguments], stdout=subprocess.PIPE, text=True)
        wait_until(lambda: waiting_reads(mounted.at) > 1)
        with locked_in_memory(*resident_paths(mounted)):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert waiting.communicate(timeout=CALL_S)[0].strip() != ""
            for pid in (mounted.pid, server):
                assert ends_within(pid, CALL_S)
            read_resident(mounted)
        assert len(os.listdir(mounted.at / "folder")) == FILES
        cold = [("read", path_of(mounted, number)) for number in range(FILES - 20, FILES)]
        assert "" not in outcomes(*cold)
        mount(request_for(mounted.source, mounted.at, "native"), program=PROGRAM)
        assert path_of(mounted, FILES - 1).read_bytes() == content_of(FILES - 1)
        umount(mounted.at)
        assert mounted_at(str(mounted.at)) is None


def kept_image() -> Path:
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "diesel" / "images"
    return max(folder.glob("*-*"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("spoil", ["truncated", "overwritten", "removed"])
def test_a_spoilt_image_hangs_no_reader(unpushed: tuple[LiveMount, int], spoil: str) -> None:
    mounted, _ = unpushed
    image = kept_image()
    size = image.stat().st_size
    if spoil == "truncated":
        os.truncate(image, 8192)
    elif spoil == "overwritten":
        with image.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(size - 4096))
    else:
        image.unlink()
    calls = [("statfs", mounted.at), ("list", mounted.at), ("list", mounted.at / "folder")]
    calls += [(name, path_of(mounted, n)) for n in range(0, FILES, 7) for name in ("stat", "read")]
    with silence() if spoil == "removed" else nullcontext():
        found = outcomes(*calls)
    assert len(found) == len(calls)
    if spoil == "removed":
        assert not any(found)
    umount(mounted.at, force=True)
    assert mounted_at(str(mounted.at)) is None
    mount(request_for(mounted.source, mounted.at, "native"), program=PROGRAM)
    for number in range(0, FILES, 100):
        assert path_of(mounted, number).read_bytes() == content_of(number)
    umount(mounted.at)

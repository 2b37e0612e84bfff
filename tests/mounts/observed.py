"""Observing mounts in tests: statistics, processes, logs, requests; and waiting for them."""

import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self, cast

from diesel_fs.client.dataset import connect
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.launcher import DAEMON, log_path
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import children_of
from diesel_fs.mounts.plans.control import Control
from diesel_fs.mounts.tree.vfs import STATS_MAX_AGE_S
from diesel_fs.system.mountinfo import mounts
from tests.mounts.conftest import LiveMount, request_for
from tests.processes import state_of
from tests.unprivileged_user import module_path
from tests.waiting import PATIENCE_S, wait_until

FILE_BYTES = 200_000
_MAP_LOCKED = 0x2000

FOREGROUND = """if True:
    import sys
    from diesel_fs.mounts import MountRequest, mount_in_foreground
    from tests.mounts.conftest import PROGRAM
    mount_in_foreground(MountRequest.from_json(sys.argv[1].encode()), program=PROGRAM)
"""


def foreground_command(source: Path, at: Path, session: str) -> list[str]:
    request = request_for(source, at, session).to_json().decode()
    return [sys.executable, "-c", FOREGROUND, request]


def noise(seed: int, size: int = FILE_BYTES) -> bytes:
    return random.Random(seed).randbytes(size)


@contextmanager
def locked_in_memory(*paths: Path) -> Iterator[None]:
    """Read files, and keep the kernel from reclaiming their pages meanwhile."""
    with ExitStack() as stack:
        for path in paths:
            with path.open("rb") as file:
                flags = mmap.MAP_SHARED | _MAP_LOCKED
                content = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
                stack.enter_context(content)
        yield


def put(
    url: str, files: Mapping[str, bytes], dataset: str = "ds", *, one_each: bool = False
) -> None:
    with connect(dataset, url, create=True) as written:
        for path, content in files.items():
            written.put(content, path)
            if one_each:
                written.flush()


@contextmanager
def mounted(request: MountRequest, program: Sequence[str] = DAEMON) -> Iterator[Path]:
    mount(request, program=program)
    try:
        yield Path(request.mountpoint)
    finally:
        if mounted_at(request.mountpoint):
            umount(request.mountpoint, force=True)


def current_stats(at: Path) -> dict[str, object]:
    with Control.connect(at) as control:
        return dict(control.stats())


def fresh_stats(mounted: LiveMount) -> dict[str, object]:
    """Return the content of `.diesel/stats`, made after this call began. It waits, since polling
    would add requests."""
    time.sleep(STATS_MAX_AGE_S + 0.02)
    values = json.loads((mounted.at / ".diesel" / "stats").read_bytes())
    assert isinstance(values, dict)
    return values


def figures(found: Mapping[str, object], *names: str) -> dict[str, int]:
    for name in names:
        found = cast("Mapping[str, object]", found[name])
    return cast("dict[str, int]", found)


def waiting_reads(at: Path) -> int:
    return figures(stats(at), "reads")["misses"]


def count_of_reads(at: Path) -> int:
    found = figures(current_stats(at), "reads")
    return found["hits"] + found["misses"]


def log_of(mounted: LiveMount) -> str:
    return log_path(request_for(mounted.source, mounted.at)).read_text()


def is_gone(pid: int) -> bool:
    """Whether a process has ended. A zombie has if its parent is pid 1, which may reap it late."""
    if state_of(pid) != "Z":
        return not state_of(pid)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"


class Processes(NamedTuple):
    supervisor: int
    server: int
    worker: int

    @classmethod
    def of(cls, at: Path) -> "Processes":
        found = figures(stats(at))
        [worker] = set(children_of(found["pid"])) - {found["server_pid"]}
        return cls(found["pid"], found["server_pid"], worker)

    def wait_for_their_end(self) -> None:
        wait_until(lambda: all(map(is_gone, self)))


def mounts_below(place: Path) -> list[str]:
    return [each.path for each in mounts() if f"{each.path}/".startswith(f"{place}/")]


class Program:
    """A Python program in its own process, which has printed a first line."""

    def __init__(
        self, text: str, *arguments: object, by: Sequence[str] = (), python: str = sys.executable
    ) -> None:
        """`by` are the words of a program that starts it."""
        self._process = subprocess.Popen(
            [*by, python, "-c", text, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )
        self.pid: int = self._process.pid
        self.first_line: str = self._read_line()
        assert self.first_line, self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, question: str) -> str:
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return self._read_line()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """Close its input, and wait for its end. Returns the output after the first line."""
        return self._process.communicate(timeout=PATIENCE_S)[0]


HOLD = """if True:
    import mmap, os, sys
    {hold}
    print("held", flush=True)
    sys.stdin.read()
    {after}
"""


def holding(hold: str, after: str = "") -> Program:
    return Program(HOLD.format(hold=hold, after=after))


def with_our_modules(home: Path, **environment: str) -> list[str]:
    values = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": module_path(),
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    return ["env", "-i", *(f"{name}={value}" for name, value in values.items())]


@contextmanager
def bound(folder: Path, at: Path, *options: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", *options, folder, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


READ = """if True:
    import os, signal, sys, threading
    def read(file):
        try:
            content = b""
            while part := os.pread(file, 1 << 20, len(content)):
                content += part  # short where a page after it cannot be read: then comes the error
        except OSError as error:
            found = b"%d" % error.errno
        else:
            right = bytes.fromhex(sys.argv[2]) * int(sys.argv[4])
            found = b"right" if content == right else b"WRONG"
        os.write(1, found + b"\\n")
    files = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(int(sys.argv[3]))]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threads = [threading.Thread(target=read, args=(file,)) for file in files]
    print("opened", flush=True)
    [thread.start() for thread in threads]
"""


def reading(path: Path, content: bytes, count: int = 1) -> Program:
    """A process with threads that read a file at once. For each read it prints an errno, or that
    the content is right: it repeats its first 16 bytes."""
    return Program(READ, path, content[:16].hex(), count, len(content) // 16)

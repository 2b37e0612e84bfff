"""With little memory every byte is right, and pushing goes on (Z2 in tests/FAULTS.md).

Memory is short in two ways: readers are in a control group that has room for few pages, and all
caches of the machine are dropped in a loop, so that the kernel forgets inodes.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import fresh_stats

pytestmark = [
    pytest.mark.deep,
    pytest.mark.fuse,
    pytest.mark.alone,
]  # it drops the machine's caches

FILES = 2000
FILE_BYTES = 12_000
LIMIT_BYTES = 24 << 20  # a Python reader needs some 10 MiB; contents and inodes do not fit

# (`if True:` lets the program be indented here.)
READ_ALL = f"""if True:
    import os, random, sys, time
    folder, end_s, seed = sys.argv[1], time.monotonic() + float(sys.argv[2]), int(sys.argv[3])
    noise, count = random.Random(seed), 0
    while time.monotonic() < end_s:
        name = noise.randrange({FILES})
        with open(os.path.join(folder, str(name)), "rb", buffering=0) as file:
            content = file.read()
        if content != name.to_bytes(4, "little") * {FILE_BYTES // 4}:
            sys.exit("wrong bytes in %d: %r" % (name, content[:8]))
        count += 1
    print(count)
"""


@pytest.fixture(scope="module")
def many_files(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveMount]:
    """A mount of some thousand files of known content, all pushed from the start (`oneshot`)."""
    source = tmp_path_factory.mktemp("pressure") / "source"
    source.mkdir()
    for number in range(FILES):
        (source / str(number)).write_bytes(number.to_bytes(4, "little") * (FILE_BYTES // 4))
    with mounting(source, source.parent / "mount", "kernel", policy="oneshot") as mounted:
        yield mounted


def residency(mounted: LiveMount) -> dict[str, int]:
    found = fresh_stats(mounted)["residency"]
    assert isinstance(found, dict)
    return found


def requests(mounted: LiveMount, *names: str) -> int:
    found = fresh_stats(mounted)["requests"]
    assert isinstance(found, dict)
    return sum(found.get(name, 0) for name in names)


@contextmanager
def small_group() -> Iterator[Path]:
    """Makes a control group with little memory. A process joins it by writing its number to the
    file that is returned."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = top / f"diesel-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
            yield folder / "cgroup.procs"
            return
        except (FileNotFoundError, PermissionError):
            continue
        finally:
            deadline_s = time.monotonic() + 5
            while folder.exists() and time.monotonic() < deadline_s:
                with suppress(OSError):
                    folder.rmdir()
                time.sleep(0.01)
    pytest.skip("no control group of memory can be made here")


def reader(
    mounted: LiveMount, seconds: float, seed: int, group: Path | None = None
) -> subprocess.Popen[str]:
    """A process that reads files in random order and checks every byte."""

    def enter() -> None:
        if group is not None:
            group.write_text(str(os.getpid()))

    return subprocess.Popen(
        [sys.executable, "-c", READ_ALL, str(mounted.at), str(seconds), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enter,  # noqa: PLW1509  # no thread forks here
    )


def check(process: "subprocess.Popen[str]") -> int:
    output, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    return int(output)


def drop_caches() -> None:
    """Make the kernel drop all pages, names and inodes that are not in use."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        pytest.skip(f"the kernel's caches cannot be dropped here: {error}")


def test_Z2_readers_with_little_memory_get_every_byte_right(many_files: LiveMount) -> None:
    """Pages for which their group has no room are freed and read again. (The kernel may free inodes
    as well; the next test makes it do so.)
    """
    with small_group() as group:
        readers = [reader(many_files, 5.0, seed, group) for seed in range(3)]
        counts = [check(process) for process in readers]
    assert min(counts) > 100


def test_Z2_forgotten_inodes_are_known_again_and_pushed(many_files: LiveMount) -> None:
    """While all caches are dropped in a loop, readers get the right bytes. The kernel sends
    FORGETs; the worker learns of them, and looks the files up again and pushes them when missed.
    """
    before = requests(many_files, "forget", "batch_forget")
    assert residency(many_files)["resident_entries"] > 0
    readers = [reader(many_files, 4.0, seed) for seed in range(3)]
    while any(process.poll() is None for process in readers):
        drop_caches()
        time.sleep(0.25)
    counts = [check(process) for process in readers]
    assert min(counts) > 100
    assert requests(many_files, "forget", "batch_forget") > before
    rng = random.Random(1)
    deadline_s = time.monotonic() + 20
    while residency(many_files)["resident_entries"] < FILES // 2:
        assert time.monotonic() < deadline_s, "what was forgotten is never pushed again"
        for number in rng.sample(range(FILES), 50):
            content = (many_files.at / str(number)).read_bytes()
            assert content == number.to_bytes(4, "little") * (FILE_BYTES // 4)


def test_forgotten_files_are_not_believed_resident(many_files: LiveMount) -> None:
    """A FORGET tells that the pages of a file are freed as well."""
    deadline_s = time.monotonic() + 20
    while residency(many_files)["resident_entries"] < FILES // 2:
        assert time.monotonic() < deadline_s
        for number in range(0, FILES, 7):
            (many_files.at / str(number)).read_bytes()
    lowest = FILES
    for _ in range(10):
        drop_caches()
        time.sleep(0.4)
        lowest = min(lowest, residency(many_files)["resident_entries"])
        if lowest < FILES // 2:
            return
    pytest.fail(f"{lowest} of {FILES} files are believed resident after all was dropped")

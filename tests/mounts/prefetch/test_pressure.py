"""With little memory every byte is right, and pushing goes on (Z2 in tests/FAULTS.md).

Memory is short in two ways: readers are in a control group that has room for few pages, and all
caches of the machine are dropped in a loop, so that the kernel forgets inodes.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.bench.control_group import ControlGroup, control_group
from tests.format.image.kernel import silence
from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import figures, fresh_stats
from tests.trees import write
from tests.waiting import wait_until

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


def source_of_many(folder: Path) -> Path:
    """Some thousand files of known content."""
    source = folder / "source"
    return write(
        source, {str(n): n.to_bytes(4, "little") * (FILE_BYTES // 4) for n in range(FILES)}
    )


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMount]:
    """A mount by the kernel session of such files, all pushed from the start (`oneshot`)."""
    source = source_of_many(tmp_path_factory.mktemp("pressure"))
    with mounting(source, source.parent / "mount", "kernel", policy="oneshot") as mounted:
        yield mounted


def resident_entries(mounted: LiveMount) -> int:
    return figures(fresh_stats(mounted), "residency")["resident_entries"]


def forgets(mounted: LiveMount) -> int:
    found = figures(fresh_stats(mounted), "requests")
    return sum(found.get(name, 0) for name in ("forget", "batch_forget"))


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[ControlGroup]:
    """A control group with this much memory."""
    with control_group() as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        names = ("memory.limit_in_bytes", "memory.max")
        file = next(group.folder / name for name in names if (group.folder / name).exists())
        file.write_text(str(limit_bytes))
        yield group


def readers(mounted: LiveMount, seconds: float, prefix: Sequence[str] = ()) -> list[Popen[str]]:
    """Processes that read files in random order and check every byte."""
    program = [*prefix, sys.executable, "-c", READ_ALL, str(mounted.at), str(seconds)]
    return [Popen([*program, str(seed)], stdout=PIPE, stderr=PIPE, text=True) for seed in range(3)]


def check(processes: list[Popen[str]]) -> None:
    """They end well, and have read many files."""
    for process in processes:
        output, complaint = process.communicate(timeout=60)
        assert process.returncode == 0, complaint
        assert int(output) > 100


def drop_caches() -> None:
    """Make the kernel drop all pages, names and inodes that are not in use."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        pytest.skip(f"the kernel's caches cannot be dropped here: {error}")


@pytest.mark.parametrize(
    ("session", "policy"), [("kernel", "oneshot"), ("native", "oneshot"), ("native", "on-demand")]
)
def test_Z2_bytes_are_right_with_little_memory(tmp_path: Path, session: str, policy: str) -> None:
    """Pages without room in their group are freed and read again. (The kernel may free inodes
    as well; the next test makes it do so.)"""
    source = source_of_many(tmp_path)
    with (
        mounting(source, tmp_path / "mount", session, policy=policy) as mounted,
        limited_group(LIMIT_BYTES) as group,
        silence(),
    ):
        check(readers(mounted, 5.0, group.prefix))


def test_Z2_forgotten_inodes_are_known_again_and_pushed(many_files: LiveMount) -> None:
    """While all caches are dropped in a loop, readers get the right bytes. The kernel sends
    FORGETs; the worker learns of them, and looks the files up again and pushes them when missed."""
    before = forgets(many_files)
    assert resident_entries(many_files) > 0
    reading = readers(many_files, 4.0)
    while any(process.poll() is None for process in reading):
        drop_caches()
        time.sleep(0.25)
    check(reading)
    assert forgets(many_files) > before
    rng = random.Random(1)

    def is_pushed_again() -> bool:
        for number in rng.sample(range(FILES), 50):
            content = (many_files.at / str(number)).read_bytes()
            assert content == number.to_bytes(4, "little") * (FILE_BYTES // 4)
        return resident_entries(many_files) >= FILES // 2

    wait_until(is_pushed_again)


def test_forgotten_files_are_not_believed_resident(many_files: LiveMount) -> None:
    """A FORGET means that the pages of a file are freed as well."""

    def is_resident() -> bool:
        for number in range(0, FILES, 7):
            (many_files.at / str(number)).read_bytes()
        return resident_entries(many_files) >= FILES // 2

    def is_forgotten() -> bool:
        drop_caches()
        time.sleep(0.4)
        return resident_entries(many_files) < FILES // 2

    wait_until(is_resident)
    wait_until(is_forgotten)

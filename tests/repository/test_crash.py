"""kill -9 at each system call that changes something, then `verify` and a second put (FAULTS A).

`strace` kills the real program at its n-th call of a kind, n from 1 until it gets through. After
each kill nothing is damaged, each visible file is whole and from the source's old or new state,
acknowledged files are there, and a second put completes the dataset.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository
from tests.tiers import fast_first

from ..datasets import dataset_state
from ..trees import Facts, facts, write

STRACE = shutil.which("strace")
DRIVER = [sys.executable, "-m", "tests.repository.put_driver"]
TOP = Path(__file__).parents[2]


def source_tree(top: Path) -> Path:
    """Ten chunks or so for each of two processes, and files of several extents."""
    small = {f"d{i % 5}/f{i:02}": os.urandom(9000) for i in range(120)}
    large = {f"large{i}": os.urandom(200_000) for i in range(2)}
    return write(top, small | large)


def run_killed(
    arguments: list[str], call: str, when: int, driver: Sequence[str] = DRIVER
) -> tuple[bool, bool]:
    """Return whether the driver was killed at its `when`-th `call`, and whether it acknowledged."""
    assert STRACE is not None, "strace is missing: make test installs it"
    done = subprocess.run(
        [
            *(STRACE, "-f", "-qq", "-o", "/dev/null", f"--trace={call}"),
            *(f"--inject={call}:signal=KILL:when={when}", *driver, *arguments),
        ],
        cwd=TOP,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    acknowledged = "acknowledged" in done.stdout
    assert acknowledged == (done.returncode == 0), done.stderr
    return done.returncode != 0, acknowledged


def check(url: str, states: list[Facts], last: Facts, acknowledged: bool) -> None:
    """`states` are old and new, whole."""
    with LocalRepository.open(url, create=True) as repository:
        if not repository.datasets():
            assert not acknowledged
            return
        repository.begin("ds")  # a file without a marker after the kill gets one
        found = repository.verify("ds")
        assert found.problems == []
        showing = dataset_state(repository)
        for path, fact in showing.items():
            if fact[0] == "file":
                assert fact in [state.get(path) for state in states], path
        if acknowledged:
            assert showing == last
        repository.recover("ds")
        again = dataset_state(repository)
        for path, fact in showing.items():  # rebuilt = live + orphans, which are of the new state
            assert path in again
            assert again[path] == fact or again[path] == last.get(path)


def put_whole(arguments: list[str], state: Facts) -> None:
    subprocess.run([*DRIVER, *arguments], cwd=TOP, check=True, capture_output=True)
    with LocalRepository.open(arguments[0]) as repository:
        assert dataset_state(repository) == state
        assert repository.verify("ds").problems == []


def kill_at_each_step(
    folder: Path, call: str, steps: Sequence[int], source: Path, before: Path | None = None
) -> int:
    """Kill a put of `source` at these of its calls: into an empty store, or into a copy of one that
    holds `before`, which a put with `--delete` then turns into `source`. Returns the number of
    kills."""
    last = facts(source)
    states = [facts(before), last] if before else [last]
    if before:
        put_whole([(folder / "store").as_uri(), str(before)], states[0])
    for number, when in enumerate(steps):
        store = folder / f"store-{when}"
        if before:
            shutil.copytree(folder / "store", store)
        arguments = [store.as_uri(), str(source), *["delete"] * bool(before)]
        killed, acknowledged = run_killed(arguments, call, when)
        check(store.as_uri(), states, last, acknowledged)
        if not killed:
            return number
        put_whole(arguments, last)
        shutil.rmtree(store)
    return len(steps)


CALLS = [
    "fsync,fdatasync",
    "link,linkat",
    "write,writev,pwrite64",
    "unlink,unlinkat",
    "mkdir,mkdirat",
]
"""Calls that change a disk; C libraries differ in which of a pair they use."""


@pytest.mark.parametrize("call", fast_first(CALLS))
def test_A1_to_A9_put_killed_at_every_step(tmp_path: Path, call: str) -> None:
    source = source_tree(tmp_path / "source")
    kills = kill_at_each_step(tmp_path, call, (1, 2, 3, 5, 8, 13, 21), source)
    assert kills >= 3, f"A16: too little was killed at {call}: proves nothing"


@pytest.mark.parametrize(
    "call", fast_first(["link,linkat", "fsync,fdatasync", "write,writev,pwrite64"])
)
def test_A10_A11_modify_and_delete_killed_at_every_step(tmp_path: Path, call: str) -> None:
    before = source_tree(tmp_path / "before")
    after = tmp_path / "after"
    shutil.copytree(before, after, symlinks=True)
    write(after, {"d0/f00": b"changed", "large": os.urandom(150_000), "new": b"new"})
    (after / "d1/f01").unlink()
    kills = kill_at_each_step(tmp_path, call, (1, 2, 3, 5, 8, 30), after, before)
    assert kills, f"A16: nothing was killed at {call}: proves nothing"


def test_a_killed_coordinator_leaves_no_process(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {f"{i}": os.urandom(50_000) for i in range(2000)})
    arguments = [(tmp_path / "store").as_uri(), str(source)]
    with subprocess.Popen([*DRIVER, *arguments], cwd=TOP) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 20
        while not (packers := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert packers, "A16: no packing process was seen: proves nothing"
        process.kill()
    while any(Path(f"/proc/{packer}").exists() for packer in packers):
        assert time.monotonic() < deadline, "a packing process outlives its coordinator"
        time.sleep(0.01)

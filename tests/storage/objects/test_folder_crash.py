"""FAULTS A2, A3: the folder store killed at every system call that changes something.

strace kills the child at the n-th system call of a kind; a first run without a kill counts the
calls. Whenever the kill comes, the object is absent or whole, a lease is old or new, and a leftover
file has a name that says which process wrote it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import diesel_fs
from diesel_fs.errors import ObjectExists
from diesel_fs.storage.objects.folder import FolderStore

DATASET = "datasets/" + "ab" * 16
NAME = f"{DATASET}/chunks/aaaa/aaaa" + "0" * 18
LEASE = f"{DATASET}/leases/me"
PARTS = [bytes([number % 251]) * 100 for number in range(3000)]
CALLS = ("mkdir", "writev", "fsync", "link", "unlink", "rename")
CHILD = """
import os, sys
from diesel_fs.storage.objects.folder import FolderStore
store = FolderStore.open(sys.argv[1])
parts = [bytes([number % 251]) * 100 for number in range(3000)]
print(os.getpid(), flush=True)
getattr(store, sys.argv[2])(sys.argv[3], parts)
print("acknowledged", flush=True)
"""


def strace(log: Path, root: Path, method: str, name: str, *inject: str) -> tuple[int, list[str]]:
    traced = "trace=" + ",".join(f"/^{call}(at2?)?$" for call in CALLS)
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", traced]
    for injection in inject:
        command += ["-e", f"inject={injection}"]
    command += [sys.executable, "-B", "-c", CHILD, str(root), method, name]
    package = Path(next(iter(diesel_fs.__path__))).parent
    environment = os.environ | {"PYTHONPATH": str(package)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return ended.returncode, ended.stdout.split()


@pytest.fixture(scope="module", autouse=True)
def _strace_works() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-qq", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"strace may not trace here: {tried.stderr.strip()}")


def kills(
    tmp_path: Path, method: str, name: str, prepared: FolderStore
) -> Iterator[tuple[str, FolderStore, int]]:
    """Kill a child at each system call of `CALLS`. Yields call, store and the child's process
    ID."""
    log, root = tmp_path / "log", tmp_path / "rehearsal"
    shutil.copytree(prepared.root, root)
    status, printed = strace(log, root, method, name)
    assert (status, printed[1:]) == (0, ["acknowledged"])
    counts = Counter(re.findall(r"^\d+\s+([a-z]+?)(?:at2?)?\(", log.read_text(), re.MULTILINE))
    for call in CALLS:
        for n in range(1, counts[call] + 1):
            root = tmp_path / f"{call}-{n}"
            shutil.copytree(prepared.root, root)
            injection = f"/^{call}(at2?)?$:signal=KILL:when={n}"
            status, printed = strace(log, root, method, name, injection)
            assert status in (-signal.SIGKILL, 128 + signal.SIGKILL), f"{call} {n} did not kill"
            assert printed[1:] == [], "it was acknowledged before the kill: it came too late"
            yield call, FolderStore.open(root), int(printed[0])
            shutil.rmtree(root)


def test_A2_A3_a_put_killed_at_each_step_leaves_the_object_absent_or_whole(tmp_path: Path) -> None:
    empty = FolderStore.create(tmp_path / "empty")
    calls, outcomes = list[str](), Counter[str]()
    for call, store, pid in kills(tmp_path, "put", NAME, empty):
        calls.append(call)
        names = [*store.housekeeping.names("datasets/")]
        assert names in ([], [NAME])
        if names:
            assert store.get(NAME) == b"".join(PARTS), f"torn at {store.root}"
        leftovers = [*store.housekeeping.leftovers()]
        for leftover in leftovers:
            assert (leftover.host, leftover.pid) == (os.uname().nodename, pid)
            store.housekeeping.discard(leftover)
        assert [*store.housekeeping.foreign()] == []
        outcomes["object"] += len(names)
        outcomes["leftover"] += len(leftovers)
        try:
            store.put(NAME, PARTS)
        except ObjectExists:
            assert names
        assert store.get(NAME) == b"".join(PARTS)
    assert {*calls} == {"mkdir", "writev", "fsync", "link", "unlink"}
    assert len(calls) >= 4 + 3 + 6 + 1 + 1
    # The test proves something only if kills fell before, between and after the link.
    assert 0 < outcomes["object"] < len(calls)
    assert outcomes["leftover"] >= 4


def test_A3_a_replace_killed_at_each_step_leaves_the_lease_old_or_new(tmp_path: Path) -> None:
    prepared = FolderStore.create(tmp_path / "prepared")
    prepared.replace(LEASE, [b"old"])
    seen: Counter[bytes] = Counter()
    for _, store, _ in kills(tmp_path, "replace", LEASE, prepared):
        content = bytes(store.get(LEASE))
        assert content in (b"old", b"".join(PARTS)), f"torn at {store.root}"
        seen[content[:3]] += 1
    assert len(seen) == 2, "no kill fell after the rename, or none before"


def test_O15_after_a_failed_fsync_the_put_is_written_again(tmp_path: Path) -> None:
    store = FolderStore.create(tmp_path / "store")
    once = "fsync:error=EIO:when=5"  # after those of the four new folders: the file's
    status, printed = strace(tmp_path / "log", tmp_path / "store", "put", NAME, once)
    assert (status, printed[1:]) == (0, ["acknowledged"])
    assert "EIO" in (tmp_path / "log").read_text()
    assert store.get(NAME) == b"".join(PARTS)
    assert [*store.housekeeping.leftovers()] == []
    other = NAME[:-1] + "1"
    always = "fsync:error=EIO:when=5+"
    status, printed = strace(tmp_path / "log", tmp_path / "store", "put", other, always)
    assert (status, printed[1:]) == (1, [])
    assert [*store.housekeeping.names("datasets/")] == [NAME]
    assert [*store.housekeeping.leftovers()] == []

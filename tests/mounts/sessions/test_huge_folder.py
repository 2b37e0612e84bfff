"""H8 at full size: a folder of a million entries."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.format.entries import RECORD, ChunkInfo, Kind, Rows
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.mounts import MountRequest, stats
from diesel_fs.mounts.plans.control import Control
from diesel_fs.mounts.processes import children_of
from diesel_fs.repository.local import LocalRepository
from tests.mounts.folder_dataset import CHUNK
from tests.mounts.observed import mounted

pytestmark = [pytest.mark.deep, pytest.mark.fuse]

ENTRIES = 1_000_000
FIRST_REQUESTS_MAX = 5
"""Requests before the first name is there. The whole listing takes a hundred times as many."""

HOPE_S = 300.0  # measured: 1 to 2 s alone; a quadratic listing is far beyond
DAEMON_BYTES_MAX = 32 << 20
"""Memory that a listing may add to the daemon. To keep one would take 50 bytes a name or more."""


def names() -> list[bytes]:
    """Names of several lengths, so that they are not sorted by number."""
    return [b"%x" % number for number in range(ENTRIES)]


def rows() -> Rows:
    """Empty files of these names in one folder, as they would come from the metadata store."""
    records = np.zeros(ENTRIES, RECORD)
    records["kind"], records["mode"], records["extents"] = Kind.FILE, 0o644, 1
    records["place"] = np.arange(ENTRIES)
    return Rows(
        folders=[b"huge"],
        folder=np.zeros(ENTRIES, np.uint32),
        names=names(),
        records=records,
        chunk=np.zeros(ENTRIES, np.uint32),
        chunks=[CHUNK],
        tails={},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A repository, and a snapshot of its dataset `ds` with that folder.

    The snapshot is made directly: putting so many files takes minutes, and a mount sees no
    difference.
    """
    folder = tmp_path_factory.mktemp("huge")
    url = (folder / "store").as_uri()
    with LocalRepository.open(url, create=True) as repository:
        repository.begin("ds").finish()
        identity = repository.dataset("ds").identity
    chunks = [ChunkInfo(CHUNK, 1 << 20)]
    parts = build_snapshot(
        None, rows(), chunks, identity=identity, dataset="ds", version=1 << 60, digest=0
    )
    (folder / "saved").write_bytes(b"".join(parts))
    return url, folder / "saved"


@dataclass(frozen=True, slots=True)
class Listing:
    """The names in the order they came, and how often the mount was asked for the first, and for
    all."""

    names: list[str]
    first_requests: int
    all_requests: int


def scan(mount: Path, folder: Path) -> Listing:
    before = requests_for_listings(mount)
    with os.scandir(folder) as entries:
        found = [next(entries).name]
        first = requests_for_listings(mount) - before
        found += [entry.name for entry in entries]
    return Listing(found, first, requests_for_listings(mount) - before)


def requests_for_listings(mount: Path) -> int:
    """How many the mount has answered."""
    with Control.connect(mount) as control:
        requests = control.stats()["requests"]
    assert isinstance(requests, dict)
    return sum(int(str(count)) for name, count in requests.items() if "readdir" in name.lower())


def own_bytes(daemon: int) -> int:
    """The memory of a mount's processes, without what they map of files."""
    found = 0
    for pid in (daemon, *children_of(daemon)):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        found += int(status.partition("RssAnon:")[2].split()[0]) << 10
    return found


def started_daemon(mount: Path) -> int:
    """The daemon's process ID, once the worker has begun."""
    end_s = time.monotonic() + HOPE_S
    while time.monotonic() < end_s:
        found = stats(mount)
        if found["session"] == "pyfuse3" or "budget_bytes" in str(found["residency"]):
            pid = found["pid"]
            assert isinstance(pid, int)
            return pid
        time.sleep(0.2)
    raise AssertionError("the worker did not begin")


def test_H8_a_folder_of_a_million_entries_is_listed_in_order(
    saved: tuple[str, Path], session: str, tmp_path: Path
) -> None:
    """The first entries come at once, all come in order, and the daemon's memory does not grow. In
    a native mount the daemon is not asked.
    """
    (tmp_path / "mount").mkdir()
    url, snapshot = saved
    at = str(tmp_path / "mount")
    request = MountRequest(url, "ds", at, session=session, snapshot_file=str(snapshot))
    expected = [name.decode() for name in sorted(names())]
    with mounted(request) as mount:
        pid = started_daemon(mount)
        before = own_bytes(pid)
        listing = scan(mount, mount / "huge")
        assert listing.names == expected
        if session == "native":
            assert listing.all_requests == 0
        else:
            assert 0 < listing.first_requests <= FIRST_REQUESTS_MAX < listing.all_requests / 10
        command = ["ls", "-f", str(mount / "huge")]
        listed = subprocess.run(command, check=True, capture_output=True, timeout=HOPE_S).stdout
        assert listed.decode().split("\n")[:-1] == [".", "..", *expected]
        assert own_bytes(pid) - before < DAEMON_BYTES_MAX

"""The golden snapshots of each format version: every later version of the code must read them
alike."""

from pathlib import Path

import pytest

from diesel_fs.format.snapshot.reader import Snapshot

from . import oracle
from .oracle import SMALL, build, shown, shown_by

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("version", [1, 2])
def test_the_golden_snapshot_still_reads_the_same(version: int) -> None:
    """It was written by `build(None, SMALL, [3, 9], version=12)`."""
    snapshot = Snapshot((GOLDEN / f"version-{version}.snapshot").read_bytes())
    assert shown_by(snapshot) == shown(SMALL)
    assert (snapshot.identity, snapshot.dataset) == (oracle.IDENTITY, "flowers")
    assert (snapshot.version, snapshot.digest) == (12, 1 << 127 | 2)
    assert list(snapshot.chunk_ids) == [oracle.chunk_id(3), oracle.chunk_id(9)]
    assert snapshot.chunk_sizes.tolist() == [1_000_003, 1_000_009]
    assert [snapshot.path(i) for i in snapshot.shadowing_folders().tolist()] == [b"c/l", b"c/x"]
    assert all(snapshot.lookup(path) == i for i, path in enumerate(shown(SMALL)))
    assert snapshot.rows_digest == oracle.rows_digest(SMALL)


def test_the_snapshot_format_has_not_changed() -> None:
    """If this fails, the format has changed: raise its version and add another golden file."""
    golden = (GOLDEN / "version-2.snapshot").read_bytes()
    assert build(None, SMALL, [3, 9], version=12) == golden

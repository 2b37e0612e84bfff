"""The golden snapshot of format version 1: every later version of the code must read it alike."""

from pathlib import Path

from diesel_fs.format.snapshot.reader import Snapshot

from . import oracle
from .oracle import SMALL, build, shown, shown_by

GOLDEN = Path(__file__).parent / "golden" / "version-1.snapshot"


def test_the_golden_snapshot_still_reads_the_same() -> None:
    """It was written by `build(None, SMALL, [3, 9], version=12)`."""
    snapshot = Snapshot(GOLDEN.read_bytes())
    assert shown_by(snapshot) == shown(SMALL)
    assert (snapshot.identity, snapshot.dataset) == (oracle.IDENTITY, "flowers")
    assert (snapshot.version, snapshot.digest) == (12, 1 << 127 | 2)
    assert list(snapshot.chunk_ids) == [oracle.chunk_id(3), oracle.chunk_id(9)]
    assert snapshot.chunk_sizes.tolist() == [1_000_003, 1_000_009]
    assert [snapshot.path(i) for i in snapshot.shadowing_folders().tolist()] == [b"c/l", b"c/x"]
    assert all(snapshot.lookup(path) == i for i, path in enumerate(shown(SMALL)))


def test_the_snapshot_format_has_not_changed() -> None:
    """If this fails, the format has changed: raise its version and add another golden file."""
    assert build(None, SMALL, [3, 9], version=12) == GOLDEN.read_bytes()

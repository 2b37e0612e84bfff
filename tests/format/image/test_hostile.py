"""FAULTS E1 and E2: any bytes are an image or one FormatError, and no snapshot becomes an image of
which the kernel complains.
"""

import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.errors import (
    CorruptError,
    ForeignError,
    FormatError,
    NewerVersionError,
    TruncatedError,
)
from diesel_fs.format.entries import Kind
from diesel_fs.format.image import Image, ImageTooLarge, Shown
from diesel_fs.format.snapshot.reader import Snapshot
from tests.examples import examples
from tests.format.snapshot import test_hostile as snapshots
from tests.format.snapshot.oracle import SMALL, OwnEntry, shown_by
from tests.rows import each_row

from .kernel import needs_erofs
from .test_mounted import check_mount
from .test_tree import check_image
from .trees import image_of, snapshot_of

ME = Shown(uid=1, gid=2)
GOOD = bytes(image_of(snapshot_of(SMALL), ME).buffer)
TRAILER_BYTES, CHECKSUM_BYTES, PARTS_AT, PARTS = 512, 8, 120, 10


def seal(data: bytes, at: int, new: bytes) -> bytes:
    start = len(data) - TRAILER_BYTES
    forged = bytearray(data)
    forged[start + at : start + at + len(new)] = new
    digest = xxhash.xxh3_64_intdigest(forged[start:-CHECKSUM_BYTES])
    return bytes(forged[:-CHECKSUM_BYTES]) + struct.pack("<Q", digest)


# Images


def test_E1_every_byte_changed_and_truncated_at_any_length() -> None:
    data, trailer_at = bytearray(GOOD), len(GOOD) - TRAILER_BYTES
    flips = [(at, 1 << at % 8, True) for at in range(len(GOOD))]
    flips += [(at, 1 << bit, False) for at in range(trailer_at, len(GOOD)) for bit in range(8)]
    for at, bit, verify in flips:
        data[at] ^= bit
        with pytest.raises(FormatError):
            Image(data, verify=verify)
        data[at] ^= bit
    Image(data, verify=True)
    for length in [*range(0, len(GOOD), 61), len(GOOD) - 1]:
        with pytest.raises(FormatError):
            Image(GOOD[:length], verify=False)


@each_row(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (GOOD[:-1], TruncatedError),
        (GOOD[:8192], TruncatedError),
        (bytes(len(GOOD)), ForeignError),
        (snapshots.SMALL + bytes(8192), ForeignError),
        (GOOD + bytes(64), TruncatedError),
        (GOOD + GOOD[-TRAILER_BYTES:], CorruptError),
        (GOOD[:1024] + GOOD[4096 : -TRAILER_BYTES - 1], ForeignError),
        (seal(GOOD, 8, b"\3"), NewerVersionError),
        (seal(GOOD, 8, b"\0"), CorruptError),
        (seal(GOOD, 10, b"\1"), CorruptError),
        (seal(GOOD, 12, b"\1"), NewerVersionError),
        (seal(GOOD, 360, b"\1"), CorruptError),
    ],
)
def test_E1_other_bytes_have_the_right_error(data: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        Image(data, verify=True)


@examples(300)
@given(st.integers(72, 360), st.binary(min_size=1, max_size=8))
def test_E2_any_counts_and_parts_are_safe_to_read(at: int, new: bytes) -> None:
    try:
        image = Image(seal(GOOD, at, new), verify=False)
    except FormatError:
        return
    assert len(image.first_block) == image.entry_count
    assert len(image.order) == len(image.start_blocks)
    whole = image.root_folder(hidden=False)
    assert len(whole) == len(image.root_folder(hidden=True)) > 0


# Snapshots


@each_row("case", snapshots.FORGERIES)
def test_E2_a_private_copy_with_columns_that_contradict_each_other(case: str) -> None:
    """When a private copy is opened, only its checksums are compared."""
    columns = snapshots.FORGERIES[case](Snapshot(snapshots.SMALL).columns)
    try:
        snapshot = Snapshot(snapshots.forged_from(columns), verify=False)
    except FormatError:
        return
    with pytest.raises(FormatError):
        image_of(snapshot, ME)


def test_E2_an_entry_that_is_missing_in_its_own_index() -> None:
    """A forged lookup index hides `.diesel` from lookups, not from the check."""
    columns = snapshot_of({b".diesek": OwnEntry(Kind.FILE)}).columns
    names = columns.names.copy()
    names[6] = ord("l")
    snapshot = Snapshot(snapshots.forged_from(columns._replace(names=names)))
    assert snapshot.lookup(b".diesel") == -1
    with pytest.raises(FormatError, match=r"\.diesel"):
        image_of(snapshot, ME)


def image_of_forged(data: st.DataObject) -> tuple[Snapshot, Image] | None:
    try:
        snapshot = Snapshot(snapshots.forged_from(snapshots.drawn_columns(data)), verify=False)
        return snapshot, image_of(snapshot, ME)
    except (FormatError, ImageTooLarge, struct.error):  # the sum of sizes exceeds 64 bits
        return None


@examples(1000)
@given(st.data())
def test_E2_a_forged_snapshot_is_refused_or_shown_faithfully(data: st.DataObject) -> None:
    made = image_of_forged(data)
    if made is not None and made[0].byte_count < 1 << 24:
        check_image(made[1], shown_by(made[0]), ME)


@needs_erofs
@pytest.mark.deep
@pytest.mark.alone
@examples(100, suppress=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_E2_the_kernel_accepts_images_of_forgeries(tmp_path: Path, data: st.DataObject) -> None:
    made = image_of_forged(data)
    if made is not None and made[0].byte_count < 1 << 24:
        check_mount(made[1], shown_by(made[0]), ME, tmp_path)

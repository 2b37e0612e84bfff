"""Golden images of all format versions: every later version of the code must read them alike."""

from pathlib import Path

import pytest

from diesel_fs.format.image import Image, Shown, build_image
from diesel_fs.format.snapshot.reader import Snapshot
from tests.format.snapshot.oracle import IDENTITY, SMALL, build, shown

from .test_tree import check_image
from .trees import CHAIN

VERSIONS = (1, 2)
SHOWN = Shown(uid=1000, gid=1001, umask=0o022)


def golden(version: int) -> Path:
    return Path(__file__).parent / "golden" / f"version-{version}.image"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_image_still_reads_the_same(version: int) -> None:
    """It was made from `build(None, SMALL, [3, 9], version=12)`."""
    image = Image(golden(version).read_bytes(), verify=True)
    assert (image.identity, image.version, image.shown) == (IDENTITY, 12, SHOWN)
    assert (image.chain, image.sequence, image.end_block) == (CHAIN, 1, 48)
    assert image.entry_count == len(shown(SMALL))
    first = dict(zip(shown(SMALL), image.first_block.tolist(), strict=True))
    assert {path: at for path, at in first.items() if at} == {
        b"a": 1,
        b"c/x/shadows": 2,
        b"c/\xff\n": 16,
    }
    assert image.start_blocks.tolist() == [1, 2, 16]
    assert [list(first)[entry] for entry in image.order] == [b"a", b"c/x/shadows", b"c/\xff\n"]
    check_image(image, shown(SMALL), SHOWN)


def test_the_image_format_has_not_changed() -> None:
    """If this fails, the format has changed: raise its version and add another golden file."""
    snapshot = Snapshot(build(None, SMALL, [3, 9], version=12))
    assert b"".join(build_image(snapshot, SHOWN, CHAIN)) == golden(VERSIONS[-1]).read_bytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_next_image_needs_only_the_golden_one(version: int) -> None:
    snapshot = Snapshot(build(None, SMALL, [3, 9], version=13))
    earlier = Image(golden(version).read_bytes(), verify=True)
    following = Image(b"".join(build_image(snapshot, SHOWN, earlier)), verify=True)
    assert (following.chain, following.sequence, following.end_block) == (CHAIN, 2, 48)
    assert following.first_block.tolist() == earlier.first_block.tolist()

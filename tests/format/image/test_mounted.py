"""The kernel shows an image as its snapshot describes it: each name, attribute and byte, without a
complaint. (fsck.erofs 1.5 is no check: it takes no extra devices.)
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given

from diesel_fs.format.entries import Kind
from diesel_fs.format.image import Image, Shown
from tests.examples import examples
from tests.format.snapshot.oracle import OwnEntry, ShownEntry, State, shown

from .erofs import BLOCK
from .kernel import mounted, needs_erofs, silence
from .test_tree import drawn_trees
from .trees import (
    ImageContentFile,
    Seen,
    differences,
    everything,
    file,
    image_of,
    page_of,
    seen_of,
    snapshot_of,
)

# `alone`: other tests' mounts would disturb `silence`
pytestmark = [pytest.mark.deep, needs_erofs, pytest.mark.alone]
ME = Shown(uid=1000, gid=1001, umask=0o022)


def write_content(image: Image, entries: Mapping[bytes, ShownEntry], path: Path) -> None:
    content = ImageContentFile(image, entries.values())
    with path.open("wb") as target:
        target.truncate((image.end_block + 1) * BLOCK)
        for address, (entry, page) in content.pages.items():
            target.seek(address * BLOCK)
            target.write(page_of(entry, page))


def walk(at: bytes) -> Iterator[bytes]:
    yield b""
    for folder, folders, files in os.walk(at):
        for name in folders + files:
            yield os.path.relpath(os.path.join(folder, name), at)


def seen_at(path: bytes) -> Seen:
    status = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else b""
    size = -1 if stat.S_ISDIR(status.st_mode) else status.st_size
    assert status.st_nlink == 1
    assert status.st_ino > 0
    assert {status.st_atime_ns, status.st_ctime_ns} == {status.st_mtime_ns}
    return Seen(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, size, target)


def check(state: State, how: Shown, folder: Path) -> None:
    """Compare a mount with the dataset, in both forms."""
    check_mount(image_of(snapshot_of(state), how), shown(state), how, folder)


def check_mount(
    image: Image, entries: Mapping[bytes, ShownEntry], how: Shown, folder: Path
) -> None:
    content = folder / "content"
    write_content(image, entries, content)
    for hidden in (False, True):
        with silence(), mounted(image, folder, content, hidden=hidden) as at:
            found = {path: seen_at(os.path.join(at, path) if path else at) for path in walk(at)}
            assert differences(found, seen_of(entries, how, hidden=hidden)) == []
            for path, entry in entries.items():
                if entry.kind == Kind.FILE:
                    compare(os.path.join(at, path), entry)
            assert os.path.lexists(at + b"/.diesel") != hidden
            assert not os.path.lexists(at + b"/missing")


def compare(path: bytes, entry: ShownEntry) -> None:
    with open(path, "rb") as opened:
        for page in range(-(-entry.size // BLOCK)):
            length = min(BLOCK, entry.size - page * BLOCK)
            assert opened.read(BLOCK) == page_of(entry, page)[:length], (path, page)
        assert opened.read(1) == b""


@pytest.mark.parametrize(
    ("state", "how"),
    [
        (everything(), Shown(uid=2**32 - 2, gid=7, umask=0o027)),
        ({}, ME),
        ({b"": OwnEntry(Kind.FOLDER, 0o775), b"a": file(3, 96, 5)}, Shown(5, 6, 0o002, 7)),
    ],
    ids=["everything odd", "empty", "private"],
)
def test_a_dataset_is_shown_faithfully(tmp_path: Path, state: State, how: Shown) -> None:
    check(state, how, tmp_path)


def test_a_folder_of_100_000_entries(tmp_path: Path) -> None:
    names = [b"%d" % number for number in range(100_000)]
    image = image_of(snapshot_of({b"wide/" + name: OwnEntry(Kind.FILE) for name in names}), ME)
    (tmp_path / "content").touch()
    with silence(), mounted(image, tmp_path, tmp_path / "content", hidden=True) as at:
        with os.scandir(at + b"/wide") as some:
            first = [next(some).name for _ in range(700)]
            assert first + [item.name for item in some] == sorted(names)
        assert all(os.path.lexists(at + b"/wide/" + name) for name in names[::97])
        numbers = {os.lstat(at + b"/wide/" + name).st_ino for name in names[::7]}
        assert len(numbers) == len(names[::7])


def test_a_file_of_5_GB(tmp_path: Path) -> None:
    size = 5 * 10**9 + 1
    state = {b"large": file(3, 96, size), b"small": file(3, 20_000, 1)}
    image = image_of(snapshot_of(state), ME)
    first = dict(zip(shown(state), image.first_block.tolist(), strict=True))[b"large"] * BLOCK
    marks = {0: b"start", 65_531: b"middle", (1 << 32) - 2: b"beyond", size - 3: b"end"}
    with (tmp_path / "content").open("wb") as content:
        content.truncate((image.end_block + 1) * BLOCK)
        for position, mark in marks.items():
            content.seek(first + position)
            content.write(mark)
    with silence(), mounted(image, tmp_path, tmp_path / "content", hidden=True) as at:
        with open(at + b"/large", "rb") as opened:
            assert os.fstat(opened.fileno()).st_size == size
            for position, mark in marks.items():
                opened.seek(position)
                assert opened.read(len(mark)) == mark
        assert os.statvfs(at).f_blocks * BLOCK - size < 2**20


def test_a_later_image_of_a_chain_reads_from_the_same_content_file(tmp_path: Path) -> None:
    before = {b"a": file(3, 96, 9000), b"b": file(3, 97, 5000), b"gone": file(3, 98, 1)}
    after = {b"new": file(4, 96, 7000), b"b": file(3, 97, 5000), b"moved/a": file(3, 96, 9000)}
    earlier = image_of(snapshot_of(before, version=1), ME)
    later = image_of(snapshot_of(after, version=2, also=[3]), ME, earlier)
    content = tmp_path / "content"
    pages = ImageContentFile(earlier, shown(before).values()).pages
    pages |= ImageContentFile(later, shown(after).values()).pages
    with content.open("wb") as target:
        for address, (entry, page) in pages.items():
            target.seek(address * BLOCK)
            target.write(page_of(entry, page))
    for image, state in ((earlier, before), (later, after)):
        with silence(), mounted(image, tmp_path, content, hidden=True) as at:
            for path, entry in shown(state).items():
                if entry.kind == Kind.FILE:
                    compare(os.path.join(at, path), entry)


@examples(10, suppress=(HealthCheck.function_scoped_fixture,))
@given(drawn_trees())
def test_an_image_of_any_tree_shows_it(tmp_path: Path, drawn: tuple[State, Shown]) -> None:
    check(*drawn, tmp_path)

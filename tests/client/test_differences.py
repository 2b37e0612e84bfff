"""Tests of differences between versions, and from a folder, against those of plain dicts."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.client.differences import Differences, compare_folder, compare_versions
from diesel_fs.errors import ConflictError, NoSuchPath, NotFoundError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.versions import empty_snapshot
from tests.format.snapshot.oracle import OwnEntry, ShownEntry, build, shown
from tests.format.snapshot.test_model import apply, batches, chunks_of

from ..trees import facts, odd_tree, write

DifferenceSummary = tuple[list[bytes], list[bytes], list[bytes], int]
"""Paths that were added, changed and removed; and the number of unchanged entries."""


def summary(found: Differences) -> DifferenceSummary:
    assert not found.failed
    return sorted(found.added), sorted(found.changed), sorted(found.removed), found.unchanged


def dicts_differ(
    then: Mapping[bytes, tuple[object, object]], now: Mapping[bytes, tuple[object, object]]
) -> DifferenceSummary:
    """The differences of two dicts that map a path to an entry's kind and its other attributes."""
    kept = {path for path in then.keys() & now.keys() if then[path][0] == now[path][0]}
    changed = {path for path in kept if then[path] != now[path]}
    added, removed = sorted(now.keys() - kept), sorted(then.keys() - kept)
    return added, sorted(changed), removed, len(kept - changed)


def seen(state: Mapping[bytes, OwnEntry], top: bytes) -> dict[bytes, tuple[object, object]]:
    def rest(each: ShownEntry) -> tuple[object, ...]:
        content = [(part.size, part.checksum) for part in each.parts]
        return each.mode, each.mtime_ns, each.size, content, each.target

    return {
        path: (each.kind, rest(each))
        for path, each in shown(state).items()
        if not top or path == top or path.startswith(top + b"/")
    }


@given(batches, batches, st.data())
def test_two_versions_differ_as_their_entries_do(
    first: dict[bytes, OwnEntry | None], second: dict[bytes, OwnEntry | None], data: st.DataObject
) -> None:
    before: dict[bytes, OwnEntry] = {}
    apply(before, first)
    after = dict(before)
    apply(after, second)
    both = sorted(shown(before).keys() & shown(after).keys())
    top = data.draw(st.sampled_from(both))
    old, new = (
        Snapshot(build(None, state, chunks_of(state, 0), version=version))
        for version, state in ((1, before), (2, after))
    )
    assert summary(compare_versions(old, new, top)) == dicts_differ(
        seen(before, top), seen(after, top)
    )
    assert summary(compare_versions(old, old, top))[:3] == ([], [], [])


def on_disk(top: Path) -> dict[bytes, tuple[object, object]]:
    return {b"" if path == b"." else path: (each[0], each[1:]) for path, each in facts(top).items()}


def folder_differs(
    view: Snapshot, folder: Path, below: bytes = b"", *, checksum: bool = False
) -> Differences:
    return compare_folder(view, below, folder, checksum=checksum, progress=lambda _: None)


def test_a_folder_differs_as_its_files_do(repository: LocalRepository, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    write(source, {"gone/a/b": b"", "to folder": b"1", "to file/x": b"2", "to link": b"3"})
    put(repository, "ds", FolderSource(source))
    then, before = on_disk(source), repository.view("ds")
    assert summary(folder_differs(before, source)) == ([], [], [], len(then))
    write(source, {"sub/new": b"n", "sub/deeper/file": b"other"})
    for name in ("gone/a/b", "to folder", "to file/x", "to link", "relative"):
        (source / name).unlink()
    for name in ("gone/a", "gone", "to file"):
        (source / name).rmdir()
    write(source, {"to folder/x": b"4", "to file": b"5"})
    (source / "to link").symlink_to("plain.txt")
    (source / "relative").symlink_to("empty")
    (source / "zeros").chmod(0o600)
    os.utime(source / "plain.txt", ns=(0, 5))
    now = on_disk(source)
    differ = dicts_differ(then, now)
    assert [len(each) for each in differ[:3]] == [5, 6, 7]
    assert summary(folder_differs(before, source)) == differ
    put(repository, "ds", FolderSource(source), options=PutOptions(delete=True))
    after = repository.view("ds")
    assert summary(compare_versions(before, after)) == differ
    assert summary(folder_differs(after, source)) == ([], [], [], len(now))
    assert summary(folder_differs(after, source / "sub", b"sub"))[:3] == ([], [], [])
    assert summary(folder_differs(after, source / "sub", b"elsewhere"))[0] == sorted(
        b"elsewhere" + path.removeprefix(b"sub") for path in now if path.startswith(b"sub")
    )


def test_contents_of_equal_times_are_compared(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"one", "b": b"two"})
    put(repository, "ds", FolderSource(source))
    view, status = repository.view("ds"), (source / "b").stat()
    (source / "b").write_bytes(b"TWO")
    os.utime(source / "b", ns=(0, status.st_mtime_ns))
    assert summary(folder_differs(view, source))[1] == []
    assert summary(folder_differs(view, source, checksum=True))[1] == [b"b"]


def test_an_empty_and_a_missing_side(repository: LocalRepository, tmp_path: Path) -> None:
    put(repository, "ds", FolderSource(write(tmp_path / "source", {"a/b": b"1"})))
    view = repository.view("ds")
    with pytest.raises(NotFoundError):
        folder_differs(view, tmp_path / "nowhere")
    with pytest.raises(ConflictError):
        folder_differs(view, tmp_path / "source", b"a/b")
    with pytest.raises(NoSuchPath):
        compare_versions(view, view, b"nowhere")
    found = folder_differs(view, write(tmp_path / "empty", {}))
    assert list(found.removed) == [b"a", b"a/b"]  # a folder before its entries
    assert list(found.added) == []
    added: Collection[bytes] = compare_versions(empty_snapshot(view.identity, "ds"), view).added
    assert (len(added), b"a/b" in added, b"b" in added) == (2, True, False)
    os.mkfifo(tmp_path / "source/pipe")
    assert [path for path, _ in folder_differs(view, tmp_path / "source").failed] == [b"pipe"]

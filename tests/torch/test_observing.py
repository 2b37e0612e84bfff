"""The files that samples open are compared with those that the dataset lists. If they differ, a
plan by either is soon given up.
"""

import ctypes
import io
import os
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from diesel_fs.torch.hook.diesel_hook.files import KnownDatasets, NestedDataset
from diesel_fs.torch.hook.diesel_hook.learning import Learner
from diesel_fs.torch.hook.diesel_hook.link import Link
from diesel_fs.torch.planner.file_tables import FileTable, MountedFiles, ShownVersion
from diesel_fs.torch.planner.observing import CHECKS_MAX, CHECKS_MIN, ObservedTable
from tests.rows import each_row

MOUNT = ShownVersion("/mnt", "", 1)
SIZE = 100


class Numbers(MountedFiles):
    """A mount with files that are called by their numbers."""

    def __init__(self) -> None:
        pass

    def find(
        self, table: FileTable, indices: Sequence[int], paths: Sequence[bytes], cwd: str
    ) -> None:
        rows = [(at, int(path)) for at, path in zip(indices, paths, strict=True) if path.isdigit()]
        samples, entries = np.array(rows, np.int64).reshape(-1, 2).T
        table.add(MOUNT, samples, entries)


Opened = Callable[[int], list[int | str]]


def listing() -> ObservedTable:
    listed = FileTable(SIZE)
    listed.add(MOUNT, np.arange(SIZE), np.arange(SIZE))
    return ObservedTable("Files", SIZE, listed)


def report_opened(
    table: ObservedTable, opened: Opened, samples: range, *, checked: bool = True
) -> str:
    rows = [opened(each) for each in samples]
    paths = [str(path).encode() for row in rows for path in row]
    counts = np.array([len(row) for row in rows], np.int64)
    return table.add(
        Numbers(), np.array(samples, np.int64), np.full(len(samples), checked), counts, paths, "/"
    )


def planned(table: ObservedTable) -> list[list[int]]:
    files = table.take(np.arange(SIZE)).get(MOUNT)
    if files is None:
        return []
    return [part.tolist() for part in np.split(files.entries, files.ends[:-1])]


LISTED = [[each] for each in range(SIZE)]


def test_T1_a_list_that_is_opened_is_believed() -> None:
    table = listing()
    assert report_opened(table, lambda at: [at, "/elsewhere"], range(50)) == ""
    assert (planned(table), table.failures, table.describe()) == (LISTED, 0, "")


def test_T1_unlisted_files_that_samples_open_are_planned_after_the_listed_ones() -> None:
    """For samples that were not seen yet, only the listed files are planned."""
    table = listing()
    assert report_opened(table, lambda at: [at + 100, at], range(40), checked=False) == ""
    assert report_opened(table, lambda _: [5], range(40, 41), checked=False) == ""
    assert report_opened(table, lambda at: [at + 100, at], range(40)) == "", "the same as before"
    assert planned(table)[:40] == [[at, at + 100] for at in range(40)]
    assert planned(table)[40:] == [[40, 5], *LISTED[41:]]
    assert "those of 41 of 100 samples, 2 files each" in table.describe()


@each_row("before", [0, SIZE])
def test_T1_a_dataset_that_opens_nothing_is_planned_no_more(before: int) -> None:
    """It may have opened its files before, in a very long epoch."""
    table = listing()
    assert report_opened(table, lambda at: [at], range(before)) == ""
    assert report_opened(table, lambda at: [at] if at % 2 else [], range(CHECKS_MAX)) == "", (
        "half of it"
    )
    notes = [report_opened(table, lambda _: [], range(at, at + 1)) for at in range(CHECKS_MIN + 1)]
    [note] = [each for each in notes if each]
    assert "does not open most of its files" in note
    assert (planned(table), table.failures, table.describe()) == ([], 1, "")
    assert report_opened(table, lambda _: [], range(50)) == "", "it is reported once"


def test_T1_learned_files_replace_a_list_of_other_files() -> None:
    table = listing()
    first = report_opened(table, lambda at: [SIZE - 1 - at], range(CHECKS_MIN))
    assert "opens other files than those that it lists: they are learned" in first
    assert (planned(table), table.failures) == ([], 1)
    assert report_opened(table, lambda at: [SIZE - 1 - at], range(SIZE), checked=False) == ""
    assert report_opened(table, lambda at: [SIZE - 1 - at], range(SIZE)) == ""
    assert planned(table) == LISTED[::-1]
    assert np.array_equal(
        table.for_all_ranks().take(np.arange(SIZE))[MOUNT].entries, np.arange(SIZE)
    )
    again = report_opened(table, lambda at: [at // 2], range(SIZE))
    assert "opens other files in each epoch: nothing is planned for it" in again
    assert (planned(table), table.failures) == ([], 2)


def test_T1_learned_files_may_be_kept_in_memory_later() -> None:
    table = ObservedTable("Own", SIZE)
    assert report_opened(table, lambda at: [at, at + 1], range(SIZE)) == ""
    assert planned(table) == [[at, at + 1] for at in range(SIZE)]
    assert "does not open most of its files" in report_opened(table, lambda _: [], range(SIZE))
    assert planned(table) == []


class Recorded(Link):
    def __init__(self) -> None:
        self.path = ""
        self.sent: list[dict[str, object]] = []
        self.rows: list[tuple[int, bool, list[str]]] = []

    def send(self, message: dict[str, object], payload: bytes | memoryview = b"") -> None:
        self.sent.append(message)
        if message["do"] != "learned":
            return
        count = message["samples"]
        assert isinstance(count, int)
        numbers = array("q", bytes(payload)[: 24 * count])
        paths = iter(os.fsdecode(bytes(payload)[24 * count :]).split("\0"))
        for at in range(0, 3 * count, 3):
            index, is_checked, files = numbers[at : at + 3]
            self.rows.append((index, bool(is_checked), [next(paths) for _ in range(files)]))


class Files(Dataset[int]):  # type: ignore[misc] # mypy skips torch
    """A list of files, which its samples open."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(folder / str(each)), 0) for each in range(SIZE)]
        for path, _ in self.samples:
            Path(path).touch()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        open(self.samples[index][0], "rb").close()
        return index


class InMemory(Files):
    def __getitem__(self, index: int) -> int:
        sys.audit("open")  # any code may raise this event
        return index


class Native(Files):
    """A library that is not Python opens the file."""

    def __getitem__(self, index: int) -> int:
        library = ctypes.CDLL(None)
        library.close(library.open(self.samples[index][0].encode(), os.O_RDONLY))
        return index


class WithLabels(Files):
    def __getitem__(self, index: int) -> int:
        open(self.samples[index - 1][0], "rb").close()
        return super().__getitem__(index)


def rows_of(
    data: Files, *, is_listed: bool = True, may_learn: bool = True
) -> list[tuple[int, bool, list[str]]]:
    link, kind = Recorded(), type(data)
    before = kind.__getitem__
    learner = Learner(link)
    learner.learn(data, NestedDataset((), "table", is_listed), may_learn=may_learn)
    for index in range(SIZE):
        assert data[index] == index
    learner.stop()
    assert kind.__getitem__ is before
    return [
        (at, checked, [os.path.basename(each) for each in files])
        for at, checked, files in link.rows
    ]


def test_T1_a_list_that_is_opened_is_checked_a_few_times(tmp_path: Path) -> None:
    """After Python's view has missed a few opens, a native reader of it is checked, too."""
    for kind, first in ((Files, 0), (Native, 1)):
        rows = rows_of(kind(tmp_path))
        assert rows == [(at, True, [str(at)]) for at in range(first, first + 16)]


def test_T1_a_list_that_is_not_opened_is_detected(tmp_path: Path) -> None:
    assert rows_of(InMemory(tmp_path)) == [(at, True, []) for at in range(1, 17)]


def test_T1_a_partial_list_is_completed_by_learning(tmp_path: Path) -> None:
    data = WithLabels(tmp_path)
    rows = [(at, at < 16, [str((at - 1) % SIZE), str(at)]) for at in range(SIZE)]
    assert rows_of(data) == rows
    assert rows_of(data, is_listed=False) == rows
    assert rows_of(data, is_listed=False, may_learn=False) == rows[:16]


class ManyWays(Files):
    """Python opens files in several ways. A file that is written is not one of the sample's."""

    def __getitem__(self, index: int) -> int:
        path = Path(self.samples[index][0])
        with open(path.with_name("log"), mode="a"), path.with_name("more").open("w"):
            os.close(os.open(path.with_name("out"), os.O_WRONLY | os.O_CREAT))
        ways: list[Callable[[], object]] = [
            lambda: open(file=path).close(),
            lambda: io.open(os.fspath(path), "rb").close(),  # noqa: UP020  (a name of its own)
            lambda: os.close(os.open(path, os.O_RDONLY)),
            path.read_bytes,
            lambda: np.fromfile(path, np.uint8),
        ]
        ways[index % len(ways)]()
        return index


def test_T1_a_list_is_checked_without_an_audit_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook could not be removed, and would cost a microsecond for each file of a loop."""
    hooks: list[object] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    opens = open, io.open, os.open
    assert rows_of(ManyWays(tmp_path)) == [(at, True, [str(at)]) for at in range(16)]
    assert not hooks
    assert (open, io.open, os.open) == opens
    rows_of(ManyWays(tmp_path), is_listed=False)
    assert len(hooks) == 1


def test_T1_a_child_that_is_forked_in_a_check_opens_files_as_ever() -> None:
    learner, opens = Learner(Recorded()), (open, io.open, os.open)
    with learner._watching(), learner._watching():
        assert open is not opens[0]
        learner._after_fork()  # as in the child
        assert (open, io.open, os.open) == opens


def test_T1_between_checks_a_class_is_unchanged(tmp_path: Path) -> None:
    """A method that the script replaces meanwhile stays, and nothing keeps the dataset alive."""

    class Own(Files):
        pass

    data, learner = Own(tmp_path), Learner(Recorded())
    learner.learn(data, NestedDataset((), "table", is_listed=True), may_learn=True)
    assert Own.__getitem__ is not Files.__getitem__
    for index in range(16):
        data[index]
    assert "__getitem__" not in vars(Own)
    learner.stop()
    learner.learn(data, NestedDataset((), "table", is_listed=True), may_learn=True)
    Own.__getitem__ = mine = lambda self, index: index  # type: ignore[method-assign]
    learner.stop()
    assert Own.__getitem__ is mine
    learner.learn(data, NestedDataset((), "table", is_listed=True), may_learn=True)
    gone = weakref.ref(data)
    del data
    assert gone() is None


def test_T1_a_list_that_changes_is_sent_again(tmp_path: Path) -> None:
    """This holds inside a subset, too, and if the subset's indices change. Unchanged lists are not
    sent again."""
    link = Recorded()
    datasets, data = KnownDatasets(link), Files(tmp_path)
    subset = Subset(data, [*range(40)])
    both = ConcatDataset([subset, data])

    def verbs() -> list[object]:
        link.sent.clear()
        assert datasets.record(both) is datasets.record(both)
        return [each["do"] for each in link.sent]

    assert verbs() == ["files", "paths", "subset", "concat"]
    assert verbs() == []
    data.samples = data.samples[::-1]
    assert verbs() == ["forget", "files", "paths", "forget", "subset", "forget", "concat"]
    data.samples[:] = data.samples[::-1]
    assert verbs()[1:3] == ["files", "paths"]
    subset.indices[:] = [*range(40, 80)]
    assert verbs() == ["forget", "subset", "forget", "concat"]
    assert verbs() == []

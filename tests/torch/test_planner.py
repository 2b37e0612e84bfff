"""The launcher's side: it handles messages of training processes, whatever happens to mounts."""

import json
import os
import subprocess
import sys
import threading
from array import array
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diesel_fs.torch.hook
from diesel_fs.torch.hook.diesel_hook import VARIABLE
from diesel_fs.torch.hook.diesel_hook.link import Link
from diesel_fs.torch.planner import PlanServer, server
from diesel_fs.torch.planner.file_tables import (
    ConcatTable,
    FileTable,
    SampleTable,
    ShownVersion,
    SubsetTable,
)
from tests.waiting import wait_until

HOOK = Path(diesel_fs.torch.hook.__file__).parent
HOPE_S = 30.0


def test_a_process_never_waits_for_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the mount never answers; the messages are handled later, in their order."""
    goes_on, handled = threading.Event(), list[object]()

    def handle(_: object, message: dict[str, object], payload: bytes) -> None:
        goes_on.wait(HOPE_S)
        handled.append((message.get("number"), len(payload)))

    monkeypatch.setattr(server._Process, "handle", handle)
    with PlanServer() as planner:
        planner.start()
        link = Link(str(planner.socket_path))

        def send() -> None:
            for number in range(100):
                link.send({"do": "more", "number": number}, memoryview(array("q", [1] * 10_000)))

        sending = threading.Thread(target=send)
        sending.start()
        sending.join(HOPE_S / 2)
        assert not sending.is_alive()
        goes_on.set()
    assert handled == [(None, 0), *((number, 80_000) for number in range(100))]


def test_messages_without_meaning_are_noted(tmp_path: Path) -> None:
    """A launcher that has ended is no error."""
    gone = Link(str(tmp_path / "none"))
    for _ in range(3):
        gone.send({"do": "hello"})
    with PlanServer() as planner:
        planner.start()
        link = Link(str(planner.socket_path))
        link.send({"do": "more", "stream": "none"})
        link.send({"do": "paths", "dataset": 3}, b"/a")
        link.send({"do": "subset", "dataset": 1, "of": "x"}, b"123")
        link.send({"no": "verb"})
        link.note("a word")
        wait_until(lambda: planner.summary.notes["a word"])
    assert sum("a malformed message" in note for note in planner.summary.notes) == 4
    assert len(planner.summary.lines()) == 6


files_of_samples = st.lists(st.lists(st.integers(0, 999), max_size=3), max_size=20)
"""For each sample of a dataset, the entries of its files in one mount."""

A, B = ShownVersion("a", "", 1), ShownVersion("b", "", 1)


def table_of(samples: list[list[int]], *others: tuple[ShownVersion, list[list[int]]]) -> FileTable:
    table = FileTable(len(samples))
    for shown, column in ((A, samples), *others):
        for index in reversed(range(len(column))):
            files = np.array(column[index], np.int64)
            table.add(shown, np.full(len(files), index), files)
    return table


def taken(table: SampleTable, indices: list[int], shown: ShownVersion = A) -> list[list[int]]:
    found = table.take(np.array(indices, np.int64)).get(shown)
    if found is None:
        return [[] for _ in indices]
    starts = [0, *found.ends.tolist()]
    assert starts[-1] == len(found.entries)
    return [found.entries[start:end].tolist() for start, end in pairwise(starts)]


def expected(samples: list[list[int]], indices: list[int]) -> list[list[int]]:
    size = len(samples)
    return [samples[index] if -size <= index < size else [] for index in indices]


@given(
    files_of_samples, files_of_samples,
    st.lists(st.integers(-25, 25), max_size=30), st.lists(st.integers(-60, 60)),
)  # fmt: skip
def test_subsets_and_concatenations_are_those_of_lists(
    first: list[list[int]], second: list[list[int]], of: list[int], indices: list[int]
) -> None:
    """Negative indices count from the end, others outside have no files."""
    whole = table_of(first)
    assert whole.files == sum(map(len, first))
    assert whole.found == sum(map(bool, first))
    assert taken(whole, indices) == expected(first, indices)
    subset = SubsetTable(whole, np.array(of, np.int64))
    inside = expected(first, of)
    assert taken(subset, indices) == expected(inside, indices)
    other = table_of([[] for _ in second], (B, second))
    both = ConcatTable([subset, other, FileTable(3), whole])
    assert both.size == len(of) + len(second) + 3 + len(first)
    nothing: list[list[int]] = [[] for _ in range(3)]
    in_a = [*inside, *([] for _ in second), *nothing, *first]
    in_b = [*([] for _ in of), *second, *nothing, *([] for _ in first)]
    assert taken(both, indices) == expected(in_a, indices)
    assert taken(both, indices, B) == expected(in_b, indices)


@given(files_of_samples, st.integers(0, 25), st.lists(st.integers(-25, 25), max_size=30))
def test_parts_and_sums_of_files(samples: list[list[int]], count: int, indices: list[int]) -> None:
    samples = [*samples, [1]]
    files, rest = (
        table_of(samples).take(np.array(each, np.int64))[A] for each in (indices, indices[count:])
    )
    first = files.first(count)
    assert first.entries.tolist() == [*chain(*expected(samples, indices[:count]))]
    joined = first.then(rest)
    assert joined.entries.tolist() == files.entries.tolist()
    assert joined.ends.tolist() == files.ends.tolist()


LOADS = """
import sys, torch
class Files(torch.utils.data.Dataset):
    samples = [(sys.executable, 0)] * 100
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
loader = torch.utils.data.DataLoader(Files(), batch_size=5, num_workers=2, prefetch_factor=3)
print(len(list(loader)))
"""


def test_files_and_the_distance_of_workers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers have three batches of five in hand: they read 30 positions apart at most."""
    handled = list[dict[str, object]]()
    monkeypatch.setattr(
        server._Process, "handle", lambda _, message, payload: handled.append(dict(message))
    )
    with PlanServer() as planner:
        planner.start()
        environment = {"PYTHONPATH": str(HOOK), VARIABLE: json.dumps(planner.settings(ahead=0))}
        ended = subprocess.run(
            [sys.executable, "-c", LOADS],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert ended.stdout == "20\n"
    verbs = [message["do"] for message in handled]
    assert verbs[:5] == ["process", "hello", "files", "paths", "order"]
    [order] = [message for message in handled if message["do"] == "order"]
    assert order["lag"] == 30

"""The launcher's side: what training processes say, whatever mounts do."""

import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diesel_fs.torch.hook
from diesel_fs.torch.hook.diesel_hook import VARIABLE
from diesel_fs.torch.hook.diesel_hook.link import Link
from diesel_fs.torch.planner import TrainingPlanner, server
from diesel_fs.torch.planner.file_tables import FileTable, ShownVersion, concatenated
from tests.waiting import wait_until

HOOK = Path(diesel_fs.torch.hook.__file__).parent
HOPE_S = 30.0


def test_a_process_never_waits_for_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the mount never answers; what was sent is handled later, in its order."""
    goes_on, handled = threading.Event(), list[object]()

    def handle(_: object, said: dict[str, object], payload: bytes) -> None:
        goes_on.wait(HOPE_S)
        handled.append((said.get("number"), len(payload)))

    monkeypatch.setattr(server._Process, "handle", handle)
    with TrainingPlanner() as planner:
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


def test_messages_without_meaning_are_noted() -> None:
    with TrainingPlanner() as planner:
        planner.start()
        link = Link(str(planner.socket_path))
        link.send({"do": "more", "stream": "none"})
        link.send({"do": "paths", "dataset": 3}, b"/a")
        link.send({"do": "subset", "dataset": 1, "of": "x"}, b"123")
        link.send({"no": "verb"})
        link.note("a word")
        wait_until(lambda: planner.summary.notes["a word"])
    assert sum("has no meaning" in note for note in planner.summary.notes) == 4
    assert len(planner.summary.lines()) == 6


def test_a_launcher_that_is_gone_is_no_error(tmp_path: Path) -> None:
    link = Link(str(tmp_path / "none"))
    for _ in range(3):
        link.send({"do": "hello"})


numbers = st.lists(st.integers(-1, 40), max_size=30)


@given(st.dictionaries(st.sampled_from("ab"), numbers), st.lists(st.integers(-40, 40)))
def test_subsets_and_concatenations_are_those_of_lists(
    columns: dict[str, list[int]], indices: list[int]
) -> None:
    """As Python's own lists: negative indices count from the end, others are nobody's."""
    size = max(map(len, columns.values()), default=5)
    padded = {name: each + [-1] * (size - len(each)) for name, each in columns.items()}
    shown = {name: ShownVersion(name, "", 1) for name in padded}
    table = FileTable(size, {shown[name]: np.array(each) for name, each in padded.items()})
    some = table.subset(np.array(indices, np.int64))
    for name, column in padded.items():
        expected = [column[each] if -size <= each < size else -1 for each in indices]
        assert some.entries[shown[name]].tolist() == expected
    both = concatenated([table, some, FileTable(3)])
    assert both.size == size + len(indices) + 3
    for name, column in padded.items():
        assert (
            both.entries[shown[name]].tolist()
            == column + some.entries[shown[name]].tolist() + [-1] * 3
        )


TOLD = """
import torch
class Files(torch.utils.data.Dataset):
    samples = [(f"/none/{n}", 0) for n in range(100)]
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
loader = torch.utils.data.DataLoader(Files(), batch_size=5, num_workers=2, prefetch_factor=3)
print(len(list(loader)))
"""


def test_files_are_told_before_the_epoch_and_how_far_apart_workers_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers have three batches of five in hand: they read 30 positions apart at most."""
    handled = list[dict[str, object]]()
    monkeypatch.setattr(
        server._Process, "handle", lambda _, said, payload: handled.append(dict(said))
    )
    with TrainingPlanner() as planner:
        planner.start()
        environment = {
            **os.environ,
            "PYTHONPATH": str(HOOK),
            VARIABLE: planner.environment(ahead=0),
        }
        ended = subprocess.run(
            [sys.executable, "-c", TOLD], env=environment, capture_output=True, text=True,
            timeout=120, check=True,
        )  # fmt: skip
        assert ended.stdout == "20\n"
    verbs = [said["do"] for said in handled]
    assert verbs[:5] == ["process", "hello", "files", "paths", "order"]
    [order] = [said for said in handled if said["do"] == "order"]
    assert order["lag"] == 30

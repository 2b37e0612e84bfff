"""Parts of objects through a task that are no parts of chunks, or no parts at all."""

from pathlib import Path

import pytest

from diesel_fs.errors import DieselError
from diesel_fs.layout import MARKER, chunk_object
from diesel_fs.repository import Repository
from diesel_fs.snapshot import Snapshot
from diesel_fs.task.client import TaskStore
from tests.task.conftest import Counting
from tests.task.stand_in_master import READ, StandIn


def test_other_objects_come_from_the_store(
    store: TaskStore,
    master: StandIn,
    inner: Counting,
    view: Snapshot,
    chunks: dict[int, bytes],
) -> None:
    marker = bytes(inner.get(MARKER))
    first, second = (chunk_object(view.identity, view.chunk_ids[at]) for at in (0, 1))
    wanted = [(first, 3, 10), (MARKER, 1, 9), (second, 0, 20), (MARKER, 0, 1)]
    found = list(map(bytes, store.read_parts(wanted)))
    assert found == [chunks[0][3:13], marker[1:10], chunks[1][:20], marker[:1]]
    assert master.kinds().count(READ) == 1


def test_a_version_without_chunks_has_none_to_ask_for(
    repository: Repository, inner: Counting, path: Path
) -> None:
    repository.begin("empty")
    store = TaskStore(inner, path, repository.view("empty"))
    assert list(map(bytes, store.read_parts([(MARKER, 0, 4)]))) == [bytes(inner.get(MARKER))[:4]]
    store.close()


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize(("start", "size"), [(-1, 5), (1 << 40, 5), (1, 0)])
def test_what_lies_outside_its_chunk_is_the_stores_error(
    store: TaskStore, view: Snapshot, start: int, size: int
) -> None:
    """The last: a byte more than there are."""
    name, size = chunk_object(view.identity, view.chunk_ids[0]), size or int(view.chunk_sizes[0])
    with pytest.raises(DieselError):
        list(store.read_parts([(name, 0, 5), (name, start, size)]))

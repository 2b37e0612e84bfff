"""Tests of pickles of a dataset: another process opens the same version, and they hold no
secret.
"""

import copy
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.client.reopening import DatasetReference
from diesel_fs.credentials import Credentials, key_text
from diesel_fs.errors import ConfigError, ConflictError, NoSuchPath, NotFoundError, UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.peers.members.options import NO_TASK, TaskOptions
from diesel_fs.remote.open import open_repository, same_view
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.urls import parse_url

from .test_addressing import CONTENTS
from .test_addressing import url as url

SECRET = "canary-09d1-and-long-enough"  # noqa: S105
REFUSED = "a pickle holds no key and no password"
DEADLINE_S = 60


@pytest.fixture
def view(url: str) -> Iterator[Snapshot]:
    with connect("ds", url) as dataset:
        yield dataset.snapshot


def sent(what: object) -> bytes:
    return bytes(ForkingPickler.dumps(what))


def _read(dataset: Dataset, results: "Connection[object, object]") -> None:
    with dataset:
        contents = {path: dataset.get(path) for path in CONTENTS}
        results.send((dataset.version, contents, [*map(bytes, dataset.read_many([*CONTENTS]))]))


def _read_in_a_worker(dataset: Dataset) -> object:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_read, args=(dataset, theirs))
    worker.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S), "the worker has sent nothing"
        return ours.recv()
    finally:
        worker.join(DEADLINE_S)
        worker.kill()
        worker.join()


def test_a_spawned_worker_reads_the_version_that_its_parent_shows(url: str) -> None:
    with connect("ds", url) as dataset, connect("ds", url) as writer:
        writer.put(b"other", "d0/f00")
        writer.put(b"more", "new")
        writer.flush()
        dataset.put(b"of the parent alone", "d1/f01")
        assert _read_in_a_worker(dataset) == (dataset.version, CONTENTS, [*CONTENTS.values()])
        dataset.close()
    with connect("ds", url) as dataset:
        assert dataset.get("d1/f01") == b"of the parent alone"


def test_a_copy_moves_on_to_newer_versions_by_itself(url: str, tmp_path: Path) -> None:
    with connect("ds", url, memory_bytes=5 << 20, compress="none") as dataset:
        dataset.save_meta(tmp_path / "meta")
        with copy.deepcopy(dataset) as other, connect("ds", url) as writer:
            writer.put(b"new", "new")
            writer.flush()
            assert other.get("new") == b"new"  # a miss makes it look for a newer version
            with pytest.raises(NoSuchPath):
                dataset.snapshot.lookup(b"new") >= 0 or dataset.get("none")
        dataset.load_meta(tmp_path / "meta")
        with copy.deepcopy(dataset) as other:
            assert other.version == dataset.version
            with pytest.raises(NoSuchPath):
                other.get("new")  # the copy stays at the loaded version, as the original does


def test_a_copy_has_the_order_of_reading(url: str) -> None:
    with connect("ds", url) as dataset:
        assert dataset._order is None
        order = dataset.shuffle(seed=3, epoch=4, group_size=2, below="d1")
        with copy.deepcopy(dataset) as other:
            assert other._order == dataset._order
            assert np.array_equal(other.shuffle(seed=3, epoch=4, group_size=2, below="d1"), order)
        dataset.refresh()
        assert dataset._order is None  # its indices are of another version


def test_S8_a_pickle_has_no_password_of_the_address(
    url: str, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = f"{url}?meta=redis://me:{SECRET}@127.0.0.1:1"
    with open_repository(url) as repository:
        repository.url = parse_url(whole)
        with pytest.raises(UsageError, match=REFUSED):  # the password is in the code
            DatasetReference.of(repository, view, NO_TASK)
        monkeypatch.setenv("DIESEL_URL", whole)
        opened = DatasetReference.of(repository, view, NO_TASK)
    assert SECRET.encode() not in sent(opened)
    assert opened.address()[0].full_url == whole
    monkeypatch.setenv("DIESEL_URL", whole.replace("127.0.0.1", "127.0.0.2"))
    with pytest.raises(ConfigError, match="does not know the password"):
        opened.address()


def test_S8_pickles_hold_no_accounts_key(view: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = b"canary-of-an-account-32-bytes..."
    server, ann = parse_url("diesel://127.0.0.1:1"), Credentials("ann", seed)
    with RemoteRepository.at(server, ann) as repository:
        with pytest.raises(UsageError, match=REFUSED):  # the key is in the code
            DatasetReference.of(repository, view, NO_TASK)
        monkeypatch.setenv("DIESEL_KEY", key_text(bytes(32)))  # another account's
        with pytest.raises(UsageError, match=REFUSED):
            DatasetReference.of(repository, view, NO_TASK)
        monkeypatch.setenv("DIESEL_KEY", key_text(seed))
        opened = DatasetReference.of(repository, view, NO_TASK)
    assert seed not in sent(opened)
    assert key_text(seed).encode() not in sent(opened)
    assert opened.address() == (server, ann)


def test_S8_a_pickle_has_no_key_of_a_task(
    url: str, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = TaskOptions(task="night", task_key=SECRET, rank=1, world=2)
    with open_repository(url) as repository:
        with pytest.raises(UsageError, match="DIESEL_TASK_KEY"):
            DatasetReference.of(repository, view, joins)
        monkeypatch.setenv("DIESEL_TASK_KEY", SECRET)
        opened = DatasetReference.of(repository, view, joins)
        keyless = DatasetReference.of(repository, view, TaskOptions(task="night"))
    assert SECRET.encode() not in sent(opened)
    assert opened.task_options_with_key == joins
    assert keyless.task_options_with_key.task_key == ""


def test_same_view_finds_exactly_that_version_or_raises(
    url: str, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, version = view.identity.hex, view.version
    with connect("ds", url) as writer:
        writer.put(b"new", "new")
    with open_repository(url) as repository:
        assert same_view(repository, "ds", identity, version).version == version
        monkeypatch.setattr("diesel_fs.remote.open.open_private_copy", lambda *_: None)
        assert same_view(repository, "ds", identity, version).version == version
        with pytest.raises(NotFoundError):
            same_view(repository, "ds", identity, 5)
        with pytest.raises(ConflictError, match="another dataset now"):
            same_view(repository, "ds", "0" * 31 + "5", version)

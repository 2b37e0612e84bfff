"""Packing in separate programs, if the object store does not work in forked children."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.errors import DieselError, ObjectStoreError, UsageError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.ingest import FolderSource, PutOptions, PutReport
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.folder import FolderStore
from dlcmd.packing import PROGRAM

from ..datasets import dataset_state
from ..trees import facts, odd_tree, write

pytestmark = pytest.mark.real_start  # it looks at its own children


@pytest.fixture(autouse=True)
def forks_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStore, "fork_safe", False)


def put(
    repository: LocalRepository, source: Path, program: Sequence[str] = PROGRAM, jobs: int = 2
) -> PutReport:
    options = PutOptions(CHUNK_BYTES_MIN, jobs=jobs)
    return ingest.put(repository, "ds", FolderSource(source, program=program), options=options)


def children() -> set[int]:
    text = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    found = {int(pid) for pid in text.split()}
    return {pid for pid in found if b"packing" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_a_tree_of_all_oddities(repository: LocalRepository, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    assert put(repository, source).failed == []
    assert dataset_state(repository) == facts(source)
    assert repository.verify("ds").sound
    assert not children()


def test_an_error_names_the_missing_program(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    with pytest.raises(UsageError, match="cannot pack"):
        put(repository, source, ())


def test_a_program_without_a_store_reports_the_reason(
    repository: LocalRepository, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    repository.url = repository.url.__class__("file", path=tmp_path / "nowhere")
    with pytest.raises(ObjectStoreError, match="nowhere"):
        put(repository, source)
    assert not children()


def test_a_program_that_cannot_pack_fails(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    with pytest.raises(DieselError, match="a packing process died"):
        put(repository, source, (sys.executable, "-c", "raise SystemExit"))
    assert not children()


def test_a_kill_ends_the_put_and_the_others(repository: LocalRepository, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(400)})
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            for pid in list(found)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.01)

    found: set[int] = set()
    real = repository.ids.next

    def next_id(*given: object) -> object:
        found.update(children())
        return real(*given)  # type: ignore[arg-type]  # what came is passed on

    repository.ids.next = next_id  # type: ignore[method-assign,assignment]  # a fault is put in
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(DieselError, match="died"):
            put(repository, source)
    finally:
        killed.append(0)
        killer.join()
    assert killed[0] > 0, "A16: nothing was killed"
    assert not children()
    repository.ids.next = real  # type: ignore[method-assign]  # a fault is put in
    assert put(repository, source).failed == []
    assert dataset_state(repository) == facts(source)

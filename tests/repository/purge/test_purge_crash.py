"""P1: kill -9 of a purge at each system call that changes something, then `verify` and another
purge."""

import shutil
import sys
from pathlib import Path

import pytest

from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.local import LocalRepository
from tests.tiers import fast_first

from ...datasets import dataset_state
from ...trees import facts, write
from ..folder_puts import put_folder
from ..test_crash import run_killed, source_tree
from .moved_clock import HOUR_S, moved_clock

DRIVER = [sys.executable, "-m", "tests.repository.purge.purge_driver"]


@pytest.fixture(scope="module")
def stores_with_holes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("holes")
    source = source_tree(folder / "source")
    store = folder / "store"
    with LocalRepository.open(store.as_uri(), create=True) as repository:
        put_folder(repository, source)
        write(source, {f"d{i % 5}/f{i:02}": b"new %d" % i for i in range(0, 120, 3)})
        for i in range(1, 120, 3):
            (source / f"d{i % 5}/f{i:02}").unlink()
        put_folder(repository, source, delete=True)
    return store, source


@pytest.mark.parametrize(
    "call",
    fast_first([
        *("link,linkat", "fsync,fdatasync", "write,writev,pwrite64", "unlink,unlinkat"),
        "rename,renameat,renameat2",
    ]),
)  # fmt: skip
def test_P1_purge_killed_at_every_step(
    stores_with_holes: tuple[Path, Path], tmp_path: Path, call: str
) -> None:
    first, source = stores_with_holes
    expected = facts(source)
    kills = 0
    for when in (1, 2, 3, 5, 8, 13, 21, 34):
        store = tmp_path / f"store-{when}"
        shutil.copytree(first, store)
        killed, acknowledged = run_killed([store.as_uri()], call, when, DRIVER)
        assert killed != acknowledged
        with LocalRepository.open(store.as_uri()) as repository:
            assert repository.verify("ds").problems == []
            assert dataset_state(repository) == expected
        if not killed:
            break
        kills += 1
        check_after_a_kill(store, expected, rebuild=bool(when % 2))
        shutil.rmtree(store)
    assert kills, f"A16: nothing was killed at {call}: proves nothing"


def check_after_a_kill(store: Path, expected: object, *, rebuild: bool) -> None:
    """Two hours later: a rebuild or the next writer, then a purge that is not killed."""
    with moved_clock() as clock:
        clock.ahead_s = 2 * HOUR_S
        with LocalRepository.open(store.as_uri()) as repository:
            if rebuild:
                repository.recover("ds")
            repository.begin("ds")
            assert dataset_state(repository) == expected
            repository.purge("ds", PurgeOptions(0, 0, 0))
            assert dataset_state(repository) == expected
            assert repository.verify("ds").problems == []
            identity = repository.dataset("ds").identity
            listed = sum(i.bytes for i in repository.objects.list(f"datasets/{identity.hex}/chu"))
            assert listed < 900_000  # some 760,000 of them are contents

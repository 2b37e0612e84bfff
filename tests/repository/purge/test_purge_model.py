"""P8: purge among all other operations on a dataset, against plain dicts, on both stores.

The oracle knows contents of paths, by version, and nothing of chunks, holes or leases. After each
step the dataset has the oracle's contents, and so has each version that is kept or has a lease;
metadata rebuilt from the chunks alone equal the live ones.
"""

import shutil
import tempfile
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import ReadLease
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.versions import KeptVersion
from tests.examples import examples

from ...datasets import file_contents
from ...storage.metadata.redis_servers import emptied_server
from .moved_clock import DAY_S, HOUR_S, moved_clock

PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/c", "large"])
CONTENTS = st.binary(max_size=40) | st.integers(1, 3).map(lambda n: bytes([n]) * (n << 16))
Contents = dict[str, bytes]


def contents(view: Snapshot, repository: LocalRepository) -> Contents:
    return {path.decode(): data for path, data in file_contents(view, repository).items()}


class PurgeModel(RuleBasedStateMachine):
    meta = ""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="diesel-purge-"))
        self.stack = ExitStack()
        self.clock = self.stack.enter_context(moved_clock())
        self.stack.enter_context(
            mock.patch("diesel_fs.client.pending_puts.CHUNK_BYTES_DEFAULT", 65536)
        )
        self.stack.enter_context(
            mock.patch("diesel_fs.repository.purge.CHUNK_BYTES_DEFAULT", 65536)
        )
        self.stack.enter_context(mock.patch("diesel_fs.repository.purge.UNDERSIZED_BYTES", 32768))
        self.url = (self.folder / "store").as_uri()
        if self.meta:
            self.url += f"?meta={emptied_server().url}"
        self.dataset: Dataset = connect("ds", self.url, create=True)
        self.model: Contents = {}
        self.versions: dict[int, Contents] = {}
        self.written: list[int] = []  # of them, those that no purge or recovery made
        self.readers: list[tuple[ReadLease, Snapshot, Contents]] = []
        self._written()

    def teardown(self) -> None:
        if hasattr(self, "dataset"):
            for lease, _, _ in self.readers:
                lease.close()
            self.dataset.close()
            self.stack.close()
            shutil.rmtree(self.folder)

    def _published(self) -> None:
        self.versions[self.dataset.refresh()] = dict(self.model)

    def _written(self) -> None:
        self._published()
        self.written.append(max(self.versions))

    def _repository(self) -> LocalRepository:
        return LocalRepository.open(self.url)

    @rule(changes=st.dictionaries(PATHS, CONTENTS, min_size=1))
    def put(self, changes: Contents) -> None:
        for path, content in changes.items():
            self.dataset.put(content, path)
        self.dataset.flush()
        self.model |= changes
        self._written()

    @rule(path=PATHS)
    def delete(self, path: str) -> None:
        if path in self.model:
            self.dataset.delete(path)
            del self.model[path]
            self._written()

    @rule(
        grace_s=st.sampled_from([-1, 0, 0, HOUR_S]),
        keep=st.sampled_from([-1, 0, 2]),
        max_unused_ppm=st.sampled_from([0, 50_000, 1_000_000]),
    )
    def purge(self, grace_s: int, keep: int, max_unused_ppm: int) -> None:
        with self._repository() as repository:
            before = repository.kept_versions("ds")
            repository.purge("ds", PurgeOptions(max_unused_ppm, keep, grace_s))
            assert repository.verify("ds").problems == []
            self._published()
            was = [write for write, _ in groupby(self._write_of(each) for each in before)]
            left = [self.versions[self._write_of(each)] for each in repository.kept_versions("ds")]
            assert all(self.versions[write] in left for write in was[-keep:] if keep > 0)

    def _write_of(self, kept: KeptVersion) -> int:
        """The version that was written last before this one, which may be a purge's own with the
        same content."""
        return max(version for version in self.written if version <= kept.version)

    @rule(hours=st.sampled_from([1, 2, 25, 49]))
    def wait(self, hours: int) -> None:
        self.clock.ahead_s += hours * HOUR_S
        for lease, view, _ in self.readers:  # as their threads would have done in time
            lease.switch_version(view.version)

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def begin_reading(self) -> None:
        view = self.dataset.snapshot
        objects = self._repository().objects
        lease = ReadLease.take(objects, view.identity, view.version)
        self.readers.append((lease, view, dict(self.model)))

    @precondition(lambda self: bool(self.readers))
    @rule()
    def end_reading(self) -> None:
        lease, _, _ = self.readers.pop(0)
        lease.close()

    @rule()
    def lose_all_metadata(self) -> None:
        self.dataset.close()
        if self.meta:
            emptied_server()
        for file in (self.folder / "store").glob("meta.sqlite*"):
            file.unlink()
        with LocalRepository.open(self.url, create=True) as repository:
            repository.recover("ds")
            assert repository.verify("ds").problems == []
        self.dataset = connect("ds", self.url)
        self._published()

    @rule()
    def space_comes_back(self) -> None:
        for lease, _, _ in self.readers:
            lease.close()
        self.readers = []
        with self._repository() as repository:
            repository.purge("ds", PurgeOptions(0, 0, 0))
            identity = repository.dataset("ds").identity
            records = repository.meta.chunks(identity)
            listed = set(repository.chunk_ids(identity))
            assert listed == {record.id for record in records}
            newest = max(listed, default=b"")
            for record in records:
                assert record.holes < record.entries or record.id == newest
        self._published()

    @invariant()
    def everything_reads_as_the_oracle_says(self) -> None:
        if not hasattr(self, "dataset"):
            return
        with self._repository() as repository:
            assert contents(repository.view("ds"), repository) == self.model
            for each in repository.kept_versions("ds"):
                expected = self.versions.get(each.version)
                if expected is not None:  # otherwise one of purge's own, between two others
                    view = repository.view_at("ds", each.version)
                    assert contents(view, repository) == expected
            for _, view, expected in self.readers:
                assert contents(view, repository) == expected


class RedisPurgeModel(PurgeModel):
    meta = "redis"


assert DAY_S == 24 * HOUR_S
PurgeModel.TestCase.settings = examples(30, steps=18)
RedisPurgeModel.TestCase.settings = examples(12, steps=18)
TestPurgeModel = PurgeModel.TestCase
TestRedisPurgeModel = RedisPurgeModel.TestCase

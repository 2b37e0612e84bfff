"""The dataset against a plain dict: random puts, overwrites, deletions, recoveries, reopenings.

The oracle is `dict[path, content]` and knows nothing of stamps, chunks or versions. After each step
the view equals it, and the metadata rebuilt from the chunks equal the live ones (FAULTS 4).
"""

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.errors import ConflictError, NoSuchPath
from diesel_fs.repository.local import LocalRepository
from tests.examples import examples

PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/c", "f\n/\udcff", "large"])
CONTENTS = st.binary(max_size=40) | st.integers(1, 3).map(lambda n: bytes([n]) * (n << 16))


class DatasetModel(RuleBasedStateMachine):
    """One writer; about every fifth chunk is small enough that files have several extents."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="diesel-model-"))
        self.url = (self.folder / "store").as_uri()
        self.small = mock.patch("diesel_fs.client.pending_puts.CHUNK_BYTES_DEFAULT", 65536)
        self.small.start()
        self.dataset: Dataset = connect("ds", self.url, create=True)
        self.model: dict[str, bytes] = {}
        self.pending: dict[
            str, list[bytes]
        ] = {}  # files that were put and not flushed, oldest first

    def teardown(self) -> None:
        if hasattr(self, "dataset"):
            self.small.stop()
            self.dataset.close()
            shutil.rmtree(self.folder)

    @rule(path=PATHS, content=CONTENTS)
    def put(self, path: str, content: bytes) -> None:
        self.dataset.put(content, path)
        self.pending.setdefault(path, []).append(content)

    @rule()
    def flush(self) -> None:
        self.dataset.flush()
        self._acknowledged()

    @rule(path=PATHS)
    def delete(self, path: str) -> None:
        self.flush()
        if path in self.model:
            self.dataset.delete(path)
            del self.model[path]
        else:
            try:
                self.dataset.delete(path)
            except NoSuchPath:
                pass
            else:
                raise AssertionError("deleted a missing path")

    @rule()
    def delete_folder(self) -> None:
        self.flush()
        inside = [path for path in self.model if path.startswith("d/")]
        try:
            self.dataset.delete("d", recursive=True)
        except NoSuchPath:
            assert not inside
        for path in inside:
            del self.model[path]

    @rule()
    def reopen(self) -> None:
        self.dataset.close()  # which flushes
        self._acknowledged()
        self.dataset = connect("ds", self.url)

    @rule()
    def lose_what_is_pending(self) -> None:
        """Leaving `with` by an exception flushes nothing; full chunks are already committed."""
        try:
            with self.dataset:
                raise RuntimeError
        except RuntimeError:
            pass
        self.dataset = connect("ds", self.url)
        for path, contents in self.pending.items():
            if (shows := self._shows(path)) in contents and shows is not None:
                self.model[path] = shows
        self.pending = {}

    @rule(lose_everything=st.booleans())
    def recover(self, lose_everything: bool) -> None:
        self.flush()
        self.dataset.close()
        if lose_everything:
            for file in (self.folder / "store").glob("meta.sqlite*"):
                file.unlink()
        with LocalRepository.open(self.url, create=True) as repository:
            before = repository.view("ds").stat(0) if not lose_everything else None
            repository.recover("ds")
            assert before is None or repository.view("ds").stat(0) == before
            assert repository.verify("ds").problems == []
        self.dataset = connect("ds", self.url)

    @invariant()
    def view_equals_model(self) -> None:
        if not hasattr(self, "dataset"):
            return
        view = self.dataset.snapshot
        assert {view.path(int(i)).decode("utf-8", "surrogateescape") for i in view.files()} == set(
            self.model
        )
        paths = sorted(self.model)
        for path, content in zip(paths, self.dataset.read_many(paths), strict=True):
            assert bytes(content) == self.model[path]

    def _acknowledged(self) -> None:
        self.model |= {path: contents[-1] for path, contents in self.pending.items()}
        self.pending = {}

    def _shows(self, path: str) -> bytes | None:
        try:
            return self.dataset.get(path)
        except (NoSuchPath, ConflictError):
            return None


DatasetModel.TestCase.settings = examples(25, steps=20)
TestDatasetModel = DatasetModel.TestCase

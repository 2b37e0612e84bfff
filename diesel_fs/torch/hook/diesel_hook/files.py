"""Finds the files that a map-style dataset lists for each index, and sends them to the launcher.

A table of files is called `PID.N` at the launcher, by the process ID and a number of
`KnownDatasets`. If a dataset has no list, the launcher learns its files while its samples are read
(`learning.py`).
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from . import arrow_tables
from .link import Link

if TYPE_CHECKING:
    Steps = Sequence[str | int]
    """The attributes and indices of lists that lead from a loader's dataset to a dataset inside
    it."""

_Row = TypeVar("_Row")

_PART = 1 << 16  # paths of one message

NEEDS_NO_MOUNT = "diesel_fs.torch.dataset"
"""The module of the datasets that read without a mount, so that no mount needs a plan."""

_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
"""The flag of classes defined in Python. Built-in ones, such as list and range, lack it and read no
files."""

_FOLDERS = ("samples", "imgs", "paths")
"""The attributes in which datasets such as `ImageFolder` list their files: as paths, or as tuples
that begin with a path."""

_SAMPLED = 256
"""The rows of a list that are compared to notice a change: few, since a change usually alters all
rows."""


class NestedDataset(NamedTuple):
    """A loader's dataset, or a dataset inside it, that reads files."""

    steps: Steps
    table: str
    """The name of its table at the launcher: process ID and number."""
    is_listed: bool


def _never_changes(_: object) -> bool:
    return True


class KnownDataset:
    """A dataset that was sent to the launcher under a number.

    `parts` are the datasets inside it that read files. `is_unchanged` is called with the dataset,
    and returns whether it still has the sent files. `is_whole`: all parts list their files.
    `is_learned`: learning has ended.
    """

    def __init__(
        self,
        number: int,
        parts: Sequence[NestedDataset],
        size: int,
        is_unchanged: Callable[[object], bool] = _never_changes,
    ) -> None:
        self.number = number
        self.is_whole = all(each.is_listed for each in parts)
        self.parts = parts
        self.size = size
        self.is_unchanged = is_unchanged
        self.is_learned = not parts
        self._seen = bytearray(size if parts else 0)
        self._news = 0  # the number of new indices since the last call of `begin`
        self._has_begun = False

    def begin(self) -> None:
        """Begin an epoch. Learning ends after the first epoch that has brought no new sample."""
        if self.is_learned:
            return
        news, self._news = self._news, 0
        if self._has_begun and not news:
            self.is_learned = True
            self._seen = bytearray()
        self._has_begun = True

    def saw(self, indices: Sequence[int]) -> None:
        seen = self._seen
        for index in indices:
            if index < len(seen) and not seen[index]:
                seen[index] = 1
                self._news += 1


class KnownDatasets:
    """The datasets of this process that the launcher knows, kept by weak references."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[int, tuple[weakref.ref[object], KnownDataset]] = {}  # by id
        self._count = 0

    def record(self, dataset: object) -> KnownDataset | None:
        """Return the record of a dataset, after sending its files if it is new or has changed. The
        result is None if no files belong to its indices, or if it needs no mount."""
        self._forget_gone()
        size = _size(dataset)
        known = self._known.get(id(dataset))
        if known is not None and known[0]() is dataset:
            if known[1].size == size and known[1].is_unchanged(dataset):
                return known[1]
            del self._known[id(dataset)]
            self._link.send({"do": "forget", "dataset": known[1].number})
        record = self._send(dataset, size)
        if record is not None:
            with suppress(TypeError):  # its class allows no weak references: sent again each time
                self._known[id(dataset)] = weakref.ref(dataset), record
        return record

    def _forget_gone(self) -> None:
        for key, (reference, record) in list(self._known.items()):
            if reference() is None:
                del self._known[key]
                self._link.send({"do": "forget", "dataset": record.number})

    def _send(self, dataset: object, size: int) -> KnownDataset | None:
        name = type(dataset).__name__
        inner = getattr(dataset, "dataset", None)
        indices = getattr(dataset, "indices", None)
        if name == "Subset" and inner is not None and indices is not None:
            return self._subset(inner, indices)
        parts = getattr(dataset, "datasets", None)
        if name == "ConcatDataset" and parts is not None:
            return self._concat(parts, size)
        rows = _rows(dataset, size)
        if rows is not None:
            seen = _sampled(rows, _path)

            def is_unchanged(dataset: object) -> bool:
                now = _rows(dataset, size)
                return now is not None and _sampled(now, _path) == seen

            return self._files(name, map(_path, rows), size, is_unchanged)
        in_table = arrow_tables.paths(dataset)
        if in_table is not None:
            return self._files(name, in_table, size)
        kind = type(dataset)
        if kind.__module__ == NEEDS_NO_MOUNT:
            return None
        if size > 0 and hasattr(kind, "__getitem__") and kind.__flags__ & _DEFINED_IN_PYTHON:
            number = self._next({"do": "learn", "size": size, "name": name})
            part = NestedDataset((), f"{os.getpid()}.{number}", is_listed=False)
            return KnownDataset(number, [part], size)
        return None

    def _subset(self, inner: object, indices: Sequence[int]) -> KnownDataset | None:
        of = self.record(inner)
        if of is None:
            return None
        column = array("q", map(int, indices))
        seen = _sampled(indices, int)

        def is_unchanged(dataset: object) -> bool:
            now = dataset.dataset, dataset.indices  # type: ignore[attr-defined] # see `_send`
            return self.record(now[0]) is of and _sampled(now[1], int) == seen

        number = self._next({"do": "subset", "of": of.number}, memoryview(column))
        parts = [each._replace(steps=("dataset", *each.steps)) for each in of.parts]
        return KnownDataset(number, parts, len(column), is_unchanged)

    def _concat(self, parts: Sequence[object], size: int) -> KnownDataset | None:
        known = [each for each in map(self.record, parts) if each is not None]
        if len(known) < len(parts):
            return None

        def is_unchanged(dataset: object) -> bool:
            return [self.record(each) for each in dataset.datasets] == known  # type: ignore[attr-defined] # see `_send`

        number = self._next({"do": "concat", "of": [each.number for each in known]})
        inner = [
            part._replace(steps=("datasets", at, *part.steps))
            for at, each in enumerate(known)
            for part in each.parts
        ]
        return KnownDataset(number, inner, size, is_unchanged)

    def _files(
        self,
        name: str,
        paths: Iterable[str],
        size: int,
        is_unchanged: Callable[[object], bool] = _never_changes,
    ) -> KnownDataset:
        number = self._next({"do": "files", "size": size, "name": name})
        left = iter(paths)
        while part := list(islice(left, _PART)):
            message = {"do": "paths", "dataset": number, "cwd": os.getcwd()}
            self._link.send(message, os.fsencode("\0".join(part)))
        known = NestedDataset((), f"{os.getpid()}.{number}", is_listed=True)
        return KnownDataset(number, [known], size, is_unchanged)

    def _next(self, message: dict[str, object], payload: bytes | memoryview = b"") -> int:
        """Send a message with a new number, and return the number."""
        self._count += 1
        self._link.send({**message, "dataset": self._count}, payload)
        return self._count


class FileListing:
    """Looks up the listed files of a dataset by index. Has no reference to the dataset."""

    def __init__(self, dataset: object) -> None:
        self._place = _place(dataset, _size(dataset))
        self.is_slow = self._place is None
        """Whether a look-up takes milliseconds, to read an Arrow table."""

    def path(self, dataset: object, index: int) -> str:
        """The listed path of a sample; "" if it has none. May raise any exception of the
        dataset."""
        if self._place is None:
            return arrow_tables.path_at(dataset, index) or ""
        return _path(_rows_at(dataset, self._place)[index])


def _size(dataset: object) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type] # or it raises
    except TypeError:
        return -1


def _rows(dataset: object, size: int) -> Sequence[object] | None:
    place = _place(dataset, size)
    return None if place is None else _rows_at(dataset, place)


def _place(dataset: object, size: int) -> Sequence[str] | None:
    """The attributes that lead to the dataset's list of files; None if it has none."""
    for place in [(each,) for each in _FOLDERS] + [("reader", each) for each in _FOLDERS]:  # timm
        try:
            found = _rows_at(dataset, place)
        except AttributeError:
            continue
        if isinstance(found, (list, tuple)) and len(found) == size and size:
            first = found[0]
            path = first[0] if isinstance(first, (tuple, list)) and first else first
            # A path that does not exist may begin at a folder that only the dataset knows
            if isinstance(path, (str, os.PathLike)) and os.path.lexists(path):
                return place
    return None


def _rows_at(dataset: object, place: Sequence[str]) -> Sequence[object]:
    for name in place:
        dataset = getattr(dataset, name)
    return dataset  # type: ignore[return-value] # see `_place`


def _path(row: object) -> str:
    # A row like the first one, which `_place` has checked
    path = row if isinstance(row, (str, os.PathLike)) else row[0]  # type: ignore[index]
    return os.fspath(path)


def _sampled(rows: Sequence[_Row], what: Callable[[_Row], object]) -> list[object]:
    size = len(rows)
    return [what(rows[at]) for at in range(0, size, max(size // _SAMPLED, 1))]

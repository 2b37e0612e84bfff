"""Which files a map-style dataset reads for each index."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from . import arrow_tables
from .link import Link

if TYPE_CHECKING:
    from .learning import Steps

_PART = 1 << 16  # paths of one message

NEEDS_NO_MOUNT = "diesel_fs.torch.dataset"
"""The module of `DieselDataset`."""

_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE; lists and ranges read no files

_FOLDERS = ("samples", "imgs", "paths")
"""Attributes of datasets of files: a list of paths, or of tuples that begin with a path."""


class Told:
    """A dataset that the launcher has been told of."""

    def __init__(self, number: int, wanted: Sequence[tuple[Steps, str]], size: int) -> None:
        """`wanted` are the datasets in it whose files are to be learned, and their tables."""
        self.number = number
        self.is_whole = not wanted
        """Whether it said all of its files itself."""
        self.wanted = wanted
        self.size = size
        self._seen = bytearray(size if wanted else 0)
        self._news = 0  # indices that were new since the last call of `goes_on`
        self._has_begun = False

    def goes_on(self) -> bool:
        """An epoch begins: whether anything is left to learn. It ends with the first epoch that
        gave nothing new."""
        if not self.wanted:
            return False
        news, self._news = self._news, 0
        if self._has_begun and not news:
            self.wanted = ()
            self._seen = bytearray()
            return False
        self._has_begun = True
        return True

    def saw(self, indices: Sequence[int]) -> None:
        """These samples were read while their dataset was learned."""
        seen = self._seen
        for index in indices:
            if index < len(seen) and not seen[index]:
                seen[index] = 1
                self._news += 1


class Datasets:
    """The datasets that the launcher has been told of."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[int, tuple[weakref.ref[object], Told]] = {}  # by id
        """Of each dataset: a reference that does not keep it, and what was told."""

        self._count = 0

    def told(self, dataset: object) -> Told | None:
        """What the launcher knows of a dataset; None where it has no files by index."""
        self._forget_gone()
        size = _size(dataset)
        known = self._known.get(id(dataset))
        if known is not None and known[0]() is dataset and known[1].size == size:
            return known[1]
        told = self._tell(dataset, size)
        if told is not None:
            with suppress(TypeError):  # of a class without references: it is told each time
                self._known[id(dataset)] = weakref.ref(dataset), told
        return told

    def _forget_gone(self) -> None:
        for key, (reference, told) in list(self._known.items()):
            if reference() is None:
                del self._known[key]
                self._link.send({"do": "forget", "dataset": told.number})

    def _tell(self, dataset: object, size: int) -> Told | None:
        name = type(dataset).__name__
        inner = getattr(dataset, "dataset", None)
        indices = getattr(dataset, "indices", None)
        if name == "Subset" and inner is not None and indices is not None:
            return self._subset(inner, indices)
        parts = getattr(dataset, "datasets", None)
        if name == "ConcatDataset" and parts is not None:
            return self._concat(parts, size)
        for holder in (dataset, getattr(dataset, "reader", None)):  # timm has a reader
            for attribute in _FOLDERS:
                found = getattr(holder, attribute, None)
                if isinstance(found, (list, tuple)) and len(found) == size and size:
                    paths = _paths(found)
                    if paths is not None:
                        return self._files(paths, size)
        in_table = arrow_tables.paths(dataset)
        if in_table is not None:
            return self._files(in_table, size)
        kind = type(dataset)
        if kind.__module__ == NEEDS_NO_MOUNT:
            return None
        if size > 0 and hasattr(kind, "__getitem__") and kind.__flags__ & _DEFINED_IN_PYTHON:
            number = self._next({"do": "learn", "size": size, "name": name})
            return Told(number, [((), f"{os.getpid()}.{number}")], size)
        return None

    def _subset(self, inner: object, indices: Sequence[int]) -> Told | None:
        of = self.told(inner)
        if of is None:
            return None
        column = array("q", map(int, indices))
        number = self._next({"do": "subset", "of": of.number}, memoryview(column))
        wanted = [(("dataset", *steps), table) for steps, table in of.wanted]
        return Told(number, wanted, len(column))

    def _concat(self, parts: Sequence[object], size: int) -> Told | None:
        told = [self.told(each) for each in parts]
        known = [each for each in told if each is not None]
        if len(known) < len(told):
            return None
        number = self._next({"do": "concat", "of": [each.number for each in known]})
        wanted = [
            (("datasets", at, *steps), table)
            for at, each in enumerate(known)
            for steps, table in each.wanted
        ]
        return Told(number, wanted, size)

    def _files(self, paths: Iterable[str], size: int) -> Told:
        number = self._next({"do": "files", "size": size})
        left = iter(paths)
        while part := list(islice(left, _PART)):
            message = {"do": "paths", "dataset": number, "cwd": os.getcwd()}
            self._link.send(message, os.fsencode("\0".join(part)))
        return Told(number, (), size)

    def _next(self, message: dict[str, object], payload: bytes | memoryview = b"") -> int:
        self._count += 1
        self._link.send({**message, "dataset": self._count}, payload)
        return self._count


def _size(dataset: object) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type] # or it raises
    except TypeError:
        return -1


def _paths(rows: Sequence[object]) -> Iterable[str] | None:
    """The paths of the rows of a dataset; None where these are not paths of files."""
    first = rows[0]
    path = first[0] if isinstance(first, (tuple, list)) and first else first
    if not isinstance(path, (str, os.PathLike)) or not os.path.lexists(path):
        return None  # or a path below a folder that only the dataset knows
    if isinstance(first, (str, os.PathLike)):
        return map(os.fspath, rows)  # type: ignore[arg-type] # as the first one is
    return (os.fspath(row[0]) for row in rows)  # type: ignore[index] # as the first

"""Which files a map-style dataset reads for each index."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from . import arrow_tables
from .link import Link

_PART = 1 << 16  # paths of one message

_FOLDERS = ("samples", "imgs", "paths")
"""Attributes of datasets of files: a list of paths, or of tuples that begin with a path."""


class Datasets:
    """The datasets that the launcher has been told of."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[int, tuple[weakref.ref[object], int, int]] = {}  # by id
        """Of each dataset: a reference that does not keep it, its size, and its number."""

        self._count = 0

    def number_of(self, dataset: object) -> int | None:
        """The number by which the launcher knows a dataset; None where its files are not known."""
        self._forget_gone()
        size = _size(dataset)
        known = self._known.get(id(dataset))
        if known is not None and known[0]() is dataset and known[1] == size:
            return known[2]
        number = self._told(dataset, size)
        if number is not None:
            with suppress(TypeError):  # of a class without references: it is told each time
                self._known[id(dataset)] = weakref.ref(dataset), size, number
        return number

    def _forget_gone(self) -> None:
        for key, (reference, _, number) in list(self._known.items()):
            if reference() is None:
                del self._known[key]
                self._link.send({"do": "forget", "dataset": number})

    def _told(self, dataset: object, size: int) -> int | None:
        name = type(dataset).__name__
        inner = getattr(dataset, "dataset", None)
        indices = getattr(dataset, "indices", None)
        if name == "Subset" and inner is not None and indices is not None:
            return self._subset(inner, indices)
        parts = getattr(dataset, "datasets", None)
        if name == "ConcatDataset" and parts is not None:
            numbers = [self.number_of(each) for each in parts]
            if None in numbers:
                return None
            return self._next({"do": "concat", "of": numbers})
        for holder in (dataset, getattr(dataset, "reader", None)):  # timm has a reader
            for attribute in _FOLDERS:
                found = getattr(holder, attribute, None)
                if isinstance(found, (list, tuple)) and len(found) == size and size:
                    paths = _paths(found)
                    if paths is not None:
                        return self._files(paths, size)
        in_table = arrow_tables.paths(dataset)
        return None if in_table is None else self._files(in_table, size)

    def _subset(self, inner: object, indices: Sequence[int]) -> int | None:
        of = self.number_of(inner)
        if of is None:
            return None
        return self._next({"do": "subset", "of": of}, memoryview(array("q", map(int, indices))))

    def _files(self, paths: Iterable[str], size: int) -> int:
        number = self._next({"do": "files", "size": size})
        left = iter(paths)
        while part := list(islice(left, _PART)):
            self._link.send({"do": "paths", "dataset": number}, os.fsencode("\0".join(part)))
        return number

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
    """The paths of the rows of a dataset; None where these are not paths."""
    first = rows[0]
    if isinstance(first, (str, os.PathLike)):
        return map(os.fspath, rows)  # type: ignore[arg-type] # as the first one is
    if isinstance(first, (tuple, list)) and first and isinstance(first[0], (str, os.PathLike)):
        return (os.fspath(row[0]) for row in rows)  # type: ignore[index] # as the first
    return None

"""How a Python program names entries of a dataset: by their paths or by their indices.

A path is `str`, `bytes` or an `os.PathLike`, relative to the dataset's root, which is `""`; its
components are separated by single slashes, and none stands at either end. An index is the number of
an entry in the version that is shown, from 0 on. Pure functions; safe from any thread.
"""

import operator
import os
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..errors import NoSuchPath, UsageError
from ..format.entries import check_path
from ..format.snapshot.reader import Indices, Snapshot
from ..repository.interface import index_of_path

PathText = str | bytes | os.PathLike[str]

EntryKey = PathText | SupportsIndex
"""How an entry is named."""

EntryKeys = Iterable[PathText] | Iterable[SupportsIndex] | npt.NDArray[np.int64]
"""How many entries are named: all by their paths, or all by their indices."""

_PATHS = (str, bytes, os.PathLike)


def is_path(where: EntryKey) -> bool:
    """Whether an entry is named by its path."""
    return isinstance(where, _PATHS)


def encoded(path: object) -> bytes:
    """A path as bytes. Raises UsageError for what is none, and for text that stands for none."""
    if not isinstance(path, _PATHS):
        raise UsageError(f"bad path {path!r}: it is no text", advice="name all entries alike")
    try:
        return os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UsageError(f"bad path {path!r}: {error.reason}") from None


def index_of(view: Snapshot, where: EntryKey) -> int:
    """The index of an entry. Raises NoSuchPath, and UsageError for what names nothing."""
    if isinstance(where, _PATHS):
        return index_of_path(view, check_path(encoded(where)))
    try:
        return _check_index(view, operator.index(where))
    except TypeError:
        raise UsageError(f"no path and no index: {where!r}") from None


def names_of(many: EntryKeys) -> list[bytes] | Indices:
    """The names of many entries: paths, or indices. Raises UsageError for what names nothing."""
    if isinstance(many, _PATHS):
        raise UsageError(f"several paths or indices are wanted, not the one path {many!r}")
    wanted = many if isinstance(many, np.ndarray | Sequence) else list(many)
    if len(wanted) and isinstance(wanted[0], _PATHS):
        return [encoded(path) for path in wanted]
    indices = np.asarray(wanted) if len(wanted) else np.empty(0, np.int64)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise UsageError("entries are named by paths or by whole numbers, all in the same way")
    return indices.astype(np.int64, copy=False)


def indices_of(view: Snapshot, names: list[bytes] | Indices) -> Indices:
    """The indices of many entries. Raises NoSuchPath, and UsageError for what is no path."""
    if isinstance(names, np.ndarray):
        for end in (names.min(), names.max()) if len(names) else ():
            _check_index(view, int(end))
        return names
    indices = view.lookup_many(names)
    for missing in np.flatnonzero(indices < 0)[:1].tolist():
        index_of_path(view, names[missing])  # says that it is not there, or is no path at all
    return indices


def _check_index(view: Snapshot, index: int) -> int:
    """An index itself, where the version that is shown has such an entry."""
    if not 0 <= index < len(view):
        raise NoSuchPath(f"index {index} is outside 0..{len(view) - 1}")
    return index

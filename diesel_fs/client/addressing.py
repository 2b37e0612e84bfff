"""Finds the entries that a Python program names by paths or indices.

A path is `str`, `bytes` or an `os.PathLike`, relative to the dataset's root (`""`), with single
slashes between its components and none at its ends. An index is the number of an entry in the shown
version, from 0 on. Pure; safe from any thread.
"""

import io
import operator
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..arguments import wrong_type
from ..errors import NoSuchPath, UsageError
from ..format.snapshot.reader import Indices, Snapshot

PathText = str | bytes | os.PathLike[str]

EntryKey = PathText | SupportsIndex
"""A path or an index."""

EntryKeys = Iterable[PathText] | Iterable[SupportsIndex] | npt.NDArray[np.int64]
"""All paths, or all indices."""

_PATHS = (str, bytes, os.PathLike)
_NO_LISTS = (bytearray, memoryview, io.IOBase, Mapping)
_MIXED = "entries are named by paths only, or by whole numbers only"


def is_path(key: EntryKey) -> bool:
    return isinstance(key, _PATHS)


def encoded(path: object) -> bytes:
    """Raises UsageError for another type or text that cannot be encoded."""
    if not isinstance(path, _PATHS):
        raise wrong_type("a path", "str, bytes or os.PathLike", path)
    try:
        return os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UsageError(f"bad path {path!r}: {error.reason}") from None


def index_of(view: Snapshot, key: EntryKey) -> int:
    """Raises NoSuchPath, and UsageError for neither a path nor an index."""
    if isinstance(key, _PATHS):
        return view.index_of(encoded(key))
    if not isinstance(key, bool):
        with suppress(TypeError):
            return _check_index(view, operator.index(key))
    raise wrong_type("an entry", "named by its path or its index", key)


def names_of(entries: EntryKeys) -> list[bytes] | Indices:
    """The entries as encoded paths, or as an array of indices, not looked up yet. Raises
    UsageError."""
    if isinstance(entries, np.ndarray) and entries.dtype == np.int64 and entries.ndim == 1:
        return entries
    if isinstance(entries, _PATHS):
        raise UsageError(
            f"this call takes several paths or indices, not the one path {reprlib.repr(entries)}",
            advice="put it in a list",
        )
    if not isinstance(entries, Iterable) or isinstance(entries, _NO_LISTS):
        raise wrong_type("the first argument", "a list of paths or a list of indices", entries)
    keys = entries if isinstance(entries, np.ndarray | Sequence) else list(entries)
    if len(keys) and isinstance(keys[0], _PATHS):
        if not all(isinstance(path, _PATHS) for path in keys):
            raise UsageError(_MIXED)
        return [encoded(path) for path in keys]
    try:
        indices = np.asarray(keys) if len(keys) else np.empty(0, np.int64)
    except (ValueError, TypeError):  # lists of several lengths
        raise UsageError(_MIXED) from None
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise UsageError(_MIXED)
    return indices.astype(np.int64, copy=False)


def indices_of(view: Snapshot, names: list[bytes] | Indices) -> Indices:
    """The indices for the result of `names_of`. Raises NoSuchPath, or UsageError for bad paths."""
    if isinstance(names, np.ndarray):
        if len(names) and int(names.view(np.uint64).max()) >= len(view):  # negative ones are large
            for outermost in (names.min(), names.max()):
                _check_index(view, int(outermost))
        return names
    indices = view.lookup_many(names)
    for missing in np.flatnonzero(indices < 0)[:1].tolist():
        view.index_of(names[missing])  # raises the error for this path
    return indices


def _check_index(view: Snapshot, index: int) -> int:
    if not 0 <= index < len(view):
        raise NoSuchPath(f"index {index} is outside 0..{len(view) - 1}")
    return index

"""Finds the files of a dataset of Hugging Face's `datasets`: its Arrow table has their paths.

`load_dataset("imagefolder")` and the like keep a path in the table for each file on this machine,
and open the file when the row is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

_OF_FILES = frozenset(("Image", "Audio", "Video", "Pdf", "Nifti"))
"""Their columns have a path and, if the content is in the table, bytes."""


class _Column(Protocol):
    """An Arrow column of structs."""

    chunks: list[_Column]
    null_count: int

    def field(self, name: str) -> _Column: ...
    def to_pylist(self) -> list[str | None]: ...
    def __len__(self) -> int: ...


class _Rows(Protocol):
    """An Arrow table."""

    def column(self, name: str) -> _Column: ...


class _Dataset(Protocol):
    """A `datasets.Dataset`."""

    features: Mapping[str, object]
    format: Mapping[str, list[str]]

    def select_columns(self, name: str) -> _Dataset: ...
    def with_format(self, kind: str) -> _Dataset: ...
    def __getitem__(self, rows: slice[int | None, int | None, None]) -> _Rows: ...


def paths(dataset: object) -> Iterable[str] | None:
    """The path of each row's file, or ""; None for other datasets, and if the table has the
    contents. Only the first column with files counts."""
    found = _column(dataset)
    return None if found is None else _paths(found[0][:].column(found[1]))


def path_at(dataset: object, index: int) -> str | None:
    found = _column(dataset)
    if found is None:
        return None
    rows, name = found
    return next(_paths(rows[index : index + 1].column(name)), None)


def _column(dataset: object) -> tuple[_Dataset, str] | None:
    """The column that names files, as a dataset of Arrow values, and its name."""
    if type(dataset).__module__ != "datasets.arrow_dataset":
        return None
    table: _Dataset = dataset  # type: ignore[assignment] # by its module
    for name, feature in table.features.items():
        if type(feature).__name__ in _OF_FILES and name in table.format["columns"]:
            rows = table.select_columns(name).with_format("arrow")
            if _has_files(rows[:1].column(name)):  # otherwise `[:]` might read all contents
                return rows, name
    return None


def _has_files(column: _Column) -> bool:
    return any(
        len(part) and part.field("bytes").null_count and not part.field("path").null_count
        for part in column.chunks
    )


def _paths(column: _Column) -> Iterator[str]:
    for part in column.chunks:
        for path in part.field("path").to_pylist():
            yield path or ""

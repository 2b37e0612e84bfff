"""Finds the files of a dataset of Hugging Face's `datasets`, by the paths in its Arrow table.

`load_dataset("imagefolder")` and the like keep each file's path in the table, and open the file
when its row is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

_OF_FILES = frozenset(("Image", "Audio", "Video", "Pdf", "Nifti"))
"""The types of columns with files: each value has a path, and bytes if the content is in the
table."""


class _Column(Protocol):
    """An Arrow column of structs."""

    chunks: list[_Column]
    null_count: int

    def field(self, name: str) -> _Column: ...
    def to_pylist(self) -> list[str | None]: ...
    def __len__(self) -> int: ...


class _Rows(Protocol):
    def column(self, name: str) -> _Column: ...


class _Dataset(Protocol):
    features: Mapping[str, object]
    format: Mapping[str, list[str]]

    def select_columns(self, name: str) -> _Dataset: ...
    def with_format(self, kind: str) -> _Dataset: ...
    def __getitem__(self, rows: slice[int | None, int | None, None]) -> _Rows: ...


def paths(dataset: object) -> Iterable[str] | None:
    """The path of the file of each row, or "" if a row has none. The result is None if the dataset
    is of another library, or its table has the contents themselves. Only the first column with
    files counts."""
    found = _column(dataset)
    return None if found is None else _paths(found[0][:].column(found[1]))


def path_at(dataset: object, index: int) -> str | None:
    """The path of one row's file, as in `paths`."""
    found = _column(dataset)
    if found is None:
        return None
    rows, name = found
    return next(_paths(rows[index : index + 1].column(name)), None)


def _column(dataset: object) -> tuple[_Dataset, str] | None:
    """The dataset reduced to its column of files, as Arrow values, and the column's name; None if
    there is no such column."""
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

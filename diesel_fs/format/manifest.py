"""A manifest: a table that names the file and the target of each sample of a dataset.

    path,target
    cats/1.jpg,cat
    dogs/7.jpg,dog

Users write it as text; in a dataset it is an ordinary file (FORMAT.md, section 11). A manifest of a
million lines is a block of bytes and columns of numbers; lines become Python objects only while
they are read. Any thread.
"""

import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..names import shown
from .entries import Kind, Names, join, path_fault
from .snapshot.reader import Indices, Snapshot

MANIFEST_NAME = b".manifest.csv"
"""A manifest's name in its folder."""

MANIFEST_BYTES_MAX = 1 << 30
"""Some ten million lines."""

FAULTS_NAMED = 10
"""Faults reported with line, path and reason; further ones are only counted."""

_LINE_BYTES_MAX = 1 << 20
_BATCH = 1 << 14  # rows that are Python objects at once
_TAB = "\t"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_BAD_TEXT = re.compile("[\0\udc80-\udcff]")  # NUL, or a byte that is not UTF-8
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_ADVICE = "a manifest is a table with commas or tabs, and its first line is `path,target`"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Samples, in the order of lines."""

    name: str
    paths: Names
    """Relative to the manifest's folder."""
    lines: npt.NDArray[np.uint32]
    """Numbers of lines, from 1 on."""
    classes: list[str]
    """Different targets: sorted as numbers if all are whole numbers, else as text."""
    targets: npt.NDArray[np.int32]
    """Indices in `classes`, by line."""
    names_files: bool
    """Whether targets are paths, too (the column `target_path`)."""

    def __len__(self) -> int:
        return len(self.lines)


class ManifestFault(NamedTuple):
    """A line whose sample cannot be used, and why."""

    line: int
    path: bytes
    reason: str


class FoundSamples(NamedTuple):
    """The entries of a manifest's samples in a snapshot. If there are faults, some are -1 or no
    files."""

    entries: npt.NDArray[np.int32]
    target_entries: npt.NDArray[np.int32] | None
    """The entry of each class, if targets are files."""
    faults: list[ManifestFault]
    fault_count: int


def parse_manifest(content: bytes, name: str) -> Manifest:
    """Parse a manifest (FORMAT.md, section 11). Raises UsageError, which names the line. `name` is
    for messages."""
    table = _Table(content, name)
    header = table.header
    path_at, target_at, names_files = _columns(header, name)
    width, joined = len(header), list[bytes]()
    lines, numbers = array("I"), array("i")
    known: dict[str, int] = {}
    for fields, starts in table.batches():
        paths, targets = fields[path_at::width], fields[target_at::width]
        text = "\0".join(paths)
        if "" in paths or "" in targets or text.count("\0") != len(paths) - 1:
            _raise_fault(table, paths, targets, starts)
        for target in dict.fromkeys(targets):
            known.setdefault(target, len(known))
        numbers.extend(map(known.__getitem__, targets))
        lines.extend(starts)
        joined.append(text.encode(*_TEXT))
        _check_paths(table, joined[-1], starts)
    if not lines:
        raise UsageError(f"the manifest {name} names no sample", advice=_ADVICE)
    classes, order = _sorted_classes(known)
    targets_by_line = order[np.frombuffer(numbers, np.int32)]
    line_numbers = np.frombuffer(lines, np.uint32)
    _check_targets(table, classes, targets_by_line, line_numbers, are_paths=names_files)
    all_paths = Names(b"\0".join(joined), len(lines))
    return Manifest(name, all_paths, line_numbers, classes, targets_by_line, names_files)


def as_csv(content: bytes, name: str) -> bytes:
    """The manifest as a dataset stores it: tabs become commas. Raises as `parse_manifest`."""
    if _separator(_first_line(content)) != _TAB:
        return content
    table, pieces = _Table(content, name), list[bytes]()
    for fields in chain([table.header], (fields for fields, _ in table.batches())):
        written, each = _Text(), iter(fields)
        rows = zip(*[each] * len(table.header), strict=True)
        csv.writer(written, lineterminator="\n").writerows(rows)
        pieces.append("".join(written.parts).encode(*_TEXT))
    return b"".join(pieces)


def find_samples(manifest: Manifest, snapshot: Snapshot, folder: bytes) -> FoundSamples:
    """Find the entries of a manifest that lies in `folder`. Faults are: a missing file, a link or a
    folder instead of one, and a file named twice."""
    entries = _lookup(manifest.paths, snapshot, folder)
    kinds = _kinds(snapshot, entries)
    is_bad = kinds != Kind.FILE
    order = np.argsort(entries, kind="stable")
    again = order[1:][entries[order][1:] == entries[order][:-1]]
    is_bad[again] = True
    target_entries, target_kinds = None, np.empty(0, np.uint8)
    if manifest.names_files:
        paths = Names.of([_bytes(each) for each in manifest.classes])
        target_entries = _lookup(paths, snapshot, folder)
        target_kinds = _kinds(snapshot, target_entries)
        is_bad |= (target_kinds != Kind.FILE)[manifest.targets]
    faults = []
    for at in np.flatnonzero(is_bad)[:FAULTS_NAMED].tolist():
        path = manifest.paths[at]
        reason = _missing_reason(int(kinds[at]))
        if not reason and target_entries is not None:
            target = _bytes(manifest.classes[manifest.targets[at]])
            why = _missing_reason(int(target_kinds[manifest.targets[at]]))
            reason = why and f"its target {shown(target)}: {why}"
        if not reason:
            first = int(manifest.lines[np.flatnonzero(entries == entries[at])[0]])
            reason = f"line {first} names it, too"
        faults.append(ManifestFault(int(manifest.lines[at]), path, reason))
    return FoundSamples(entries, target_entries, faults, int(np.count_nonzero(is_bad)))


# Reading

_TEXT = ("utf-8", "surrogateescape")


class _Text:
    """Collects the text that `csv.writer` writes."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def write(self, text: str) -> None:
        self.parts.append(text)


def _bytes(text: str) -> bytes:
    return text.encode(*_TEXT)


def _first_line(content: bytes) -> str:
    end = content.find(b"\n", 0, _LINE_BYTES_MAX)
    return content[: _LINE_BYTES_MAX if end < 0 else end].decode(*_TEXT)


def _separator(header: str) -> str:
    return _TAB if _TAB in header else ","


class _Table:
    def __init__(self, content: bytes, name: str) -> None:
        """Raises UsageError."""
        if content.startswith(_UTF_16):
            raise UsageError(f"the manifest {name} is UTF-16", advice="save it as UTF-8")
        separator = _separator(_first_line(content))
        self._name = name
        self._reader = csv.reader(
            chain.from_iterable(self._blocks(content)),
            delimiter=separator,
            quoting=csv.QUOTE_NONE if separator == _TAB else csv.QUOTE_MINIMAL,
            strict=True,
        )
        self._line = 1
        self.header: list[str] = next(self._rows(1), [])

    def batches(self) -> Iterator[tuple[list[str], "array[int]"]]:
        """The fields of rows, row after row, and each row's first line. Skips empty rows. Raises
        UsageError."""
        width = len(self.header)
        while True:
            # One flat list: a million small ones would keep the garbage collector busy
            fields, lines = list[str](), array("I")
            for row in self._rows(_BATCH):
                if len(row) != width:
                    reason = f"it has {len(row)} fields, and the header {width}"
                    raise self.error(self._line, reason)
                fields += row
                lines.append(self._line)
            if not fields:
                return
            yield fields, lines

    def _rows(self, count: int) -> Iterator[list[str]]:
        """The next rows that are not empty; `_line` is each one's first line."""
        after = self._reader.line_num
        try:
            for row in self._reader:
                if row:
                    self._line = after + 1
                    yield row
                    count -= 1
                after = self._reader.line_num
                if not count:
                    return
        except csv.Error as error:
            reason = f"{error}; is a quote open, or not doubled?"
            raise self.error(self._reader.line_num, reason) from error

    def error(self, line: int, reason: str) -> UsageError:
        return UsageError(f"{self._name}, line {line}: {reason}", advice=_ADVICE)

    def bad_path(self, line: int, path: bytes) -> UsageError:
        return self.error(line, f"bad path {shown(path)}: it has {path_fault(path)}")

    def _blocks(self, content: bytes) -> Iterator[list[str]]:
        at = len(_BYTE_ORDER_MARK) if content.startswith(_BYTE_ORDER_MARK) else 0
        while at < len(content):
            end = min(at + _LINE_BYTES_MAX, len(content))
            if end < len(content):
                end = content.rfind(b"\n", at, end) + 1
            if not end:
                line = content.count(b"\n", 0, at) + 1
                raise self.error(line, f"it has more than {_LINE_BYTES_MAX:,} bytes")
            lines = content[at:end].decode(*_TEXT).split("\n")
            if not lines[-1]:
                lines.pop()
            yield [f"{line}\n" for line in lines]
            at = end


def _raise_fault(
    table: _Table, paths: Sequence[str], targets: Sequence[str], lines: Sequence[int]
) -> NoReturn:
    for path, target, line in zip(paths, targets, lines, strict=True):
        if not path or not target:
            missing = f"{shown(_bytes(path))} has no target" if path else "it has no path"
            raise table.error(line, missing)
        if "\0" in path:
            raise table.bad_path(line, _bytes(path))
    raise AssertionError("one of the samples is at fault")


def _columns(header: Sequence[str], name: str) -> tuple[int, int, bool]:
    """The columns of path and target, and whether the target is a path."""
    targets = [each for each in header if each in ("target", "target_path")]
    if header.count("path") != 1 or len(targets) != 1:
        found = shown(_bytes(",".join(header)))[:80]
        raise UsageError(
            f"{name}, line 1: the header {found!r} does not name one column `path`, and one that is"
            " `target` or `target_path`",
            advice=_ADVICE,
        )
    return header.index("path"), header.index(targets[0]), targets[0] == "target_path"


def _sorted_classes(known: dict[str, int]) -> tuple[list[str], npt.NDArray[np.int32]]:
    """The sorted classes, and the position of each of `known`'s numbers there."""
    if all(map(_WHOLE_NUMBER.fullmatch, known)):
        classes = sorted(known, key=lambda text: (int(text), text))
    else:
        classes = sorted(known)
    order = np.empty(len(known), np.int32)
    order[[known[each] for each in classes]] = np.arange(len(known), dtype=np.int32)
    return classes, order


def _check_paths(table: _Table, joined: bytes, lines: Sequence[int]) -> None:
    """Raise UsageError for the first path that no dataset can have. `joined`: by NULs."""
    components = joined.replace(b"/", b"\0")
    if Names(components, components.count(b"\0") + 1).are_allowed():
        return
    for path, line in zip(joined.split(b"\0"), lines, strict=True):
        if path_fault(path):
            raise table.bad_path(line, path)


def _check_targets(
    table: _Table,
    classes: Sequence[str],
    targets: npt.NDArray[np.int32],
    lines: npt.NDArray[np.uint32],
    *,
    are_paths: bool,
) -> None:
    for number, each in enumerate(classes):
        if are_paths:
            is_good = not path_fault(_bytes(each))
        else:
            is_good = each.isprintable() or not _BAD_TEXT.search(each)
        if is_good:
            continue
        line, target = int(lines[np.argmax(targets == number)]), _bytes(each)
        if are_paths:
            raise table.bad_path(line, target)
        wrong = "has a NUL" if "\0" in each else "is not UTF-8"
        raise table.error(line, f"its target {shown(target)} {wrong}")


# Looking up


def _lookup(paths: Names, snapshot: Snapshot, folder: bytes) -> npt.NDArray[np.int32]:
    found = np.empty(len(paths), np.int32)
    for start in range(0, len(paths), _BATCH):
        some = [join(folder, path) for path in paths[start : start + _BATCH]]
        found[start : start + len(some)] = snapshot.lookup_many(some)
    return found


def _kinds(snapshot: Snapshot, entries: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """The kind of each entry; TOMBSTONE for a missing one (-1)."""
    indices: Indices = np.maximum(entries, 0).astype(np.int64)
    kinds = snapshot.stat_many(indices).kind
    return np.where(entries < 0, np.uint8(Kind.TOMBSTONE), kinds)


def _missing_reason(kind: int) -> str:
    """Why an entry of this kind is no sample; empty for a file."""
    if kind == Kind.FILE:
        return ""
    if kind == Kind.TOMBSTONE:
        return "the dataset has no such file"
    return "it is a link, not a file" if kind == Kind.LINK else "it is a folder, not a file"

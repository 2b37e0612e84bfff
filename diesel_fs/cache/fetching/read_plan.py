"""Plans the reads for files: finds their extents, and the spans to read them in. Pure.

`coalesce.py` defines extents and spans, and decides which extents share a span.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...format.entries import Kind
from ...format.snapshot.layout import CODEC_SHIFT, MANY_EXTENTS, kinds
from ...format.snapshot.reader import Extent, Snapshot
from .coalesce import is_sparse, merge_spans

Span: TypeAlias = tuple[int, int, int]
"""A range of a chunk that is read in one piece: the chunk's number, its start, its bytes."""

SomeEntries = npt.NDArray[np.int64] | npt.NDArray[np.uint32]

_ROW = np.dtype([(name, "<u8" if name == "checksum" else "<i8")
                 for name in ("entry", *Extent._fields)])  # fmt: skip

Rows = npt.NDArray[np.void]
"""Extents, with the fields of `Extent` and the entry of each."""


class ReadPlan(NamedTuple):
    """Extents sorted by chunk and offset, and the spans that they are read in."""

    rows: Rows
    cuts: list[int]
    """Where in `rows` the extents of each span begin, and at last the number of rows."""
    spans: list[Span]
    bytes: int
    """The size of all spans together."""

    def rows_of(self, number: int) -> Rows:
        return self.rows[self.cuts[number] : self.cuts[number + 1]]

    def rows_of_some(self, numbers: Sequence[int]) -> Rows:
        """The extents of spans. `numbers` ascend, none twice."""
        if numbers[-1] - numbers[0] == len(numbers) - 1:  # no gap between them
            return self.rows[self.cuts[numbers[0]] : self.cuts[numbers[-1] + 1]]
        cuts, some = np.array(self.cuts), np.array(numbers)
        counts = cuts[some + 1] - cuts[some]
        before = np.cumsum(counts) - counts
        rows: Rows = self.rows[np.repeat(cuts[some] - before, counts) + np.arange(counts.sum())]
        return rows

    def contents(self, number: int, read: memoryview) -> Sequence[memoryview]:
        """The stored bytes of each extent of a span, out of those of the span."""
        rows = self.rows_of(number)
        if len(rows) == 1 and rows["stored"][0] == len(read):
            return (read,)
        first = rows["offset"] - self.spans[number][1]
        places = zip(first.tolist(), (first + rows["stored"]).tolist(), strict=True)
        return [read[begin:end] for begin, end in places]

    def narrowed(self, entries: SomeEntries) -> "ReadPlan":
        """The plan for some of its entries, without the spans that have none of them."""
        is_wanted = np.isin(self.rows["entry"], entries)
        counts = np.add.reduceat(is_wanted.astype(np.int64), self.cuts[:-1])
        spans = [span for span, count in zip(self.spans, counts.tolist(), strict=True) if count]
        cuts = [0, *np.cumsum(counts[counts > 0]).tolist()]
        return ReadPlan(self.rows[is_wanted], cuts, spans, sum(size for *_, size in spans))


def plan_reads(
    snapshot: Snapshot,
    entries: SomeEntries,
    *,
    gap_bytes: int,
    span_bytes: int,
    sparse_gap_bytes: int | None = None,
) -> ReadPlan:
    """The spans are made by `merge_spans`. `sparse_gap_bytes`: the limit of gaps in a chunk of
    which little is wanted (`is_sparse`). None: the same as `gap_bytes`."""
    rows = rows_of(snapshot, np.asarray(entries, np.int64))
    rows = rows[np.lexsort((rows["offset"], rows["chunk"]))]
    chunks, starts, ends = rows["chunk"], rows["offset"].copy(), rows["offset"] + rows["stored"]
    gaps: int | npt.NDArray[np.int64] = gap_bytes
    if sparse_gap_bytes is not None and len(rows):
        sparse = is_sparse(chunks, starts, ends, gap_bytes)
        gaps = np.where(sparse, min(sparse_gap_bytes, gap_bytes), gap_bytes)
    cuts = merge_spans(chunks, starts, ends, gap_bytes=gaps, span_bytes=span_bytes)
    firsts = np.array(cuts[:-1], np.int64)
    sizes = np.maximum.reduceat(ends, firsts) - starts[firsts] if len(rows) else firsts
    spans = zip(
        rows["chunk"][firsts].tolist(), starts[firsts].tolist(), sizes.tolist(), strict=True
    )
    return ReadPlan(rows, cuts, list(spans), int(sizes.sum()))


def rows_of(snapshot: Snapshot, entries: npt.NDArray[np.int64]) -> Rows:
    """Entries without content have no rows."""
    columns = snapshot.columns
    flags = columns.flags[entries]
    many = (flags & MANY_EXTENTS) != 0
    plain = entries[~many & (columns.stored[entries] > 0) & (kinds(flags) == Kind.FILE)]
    rows = np.zeros(len(plain), _ROW)
    rows["entry"] = plain
    for name in ("chunk", "offset", "stored", "checksum", "size"):
        rows[name] = getattr(columns, name)[plain]
    rows["codec"] = columns.flags[plain] >> CODEC_SHIFT & 0xFF
    if not many.any():
        return rows
    parts = [(i, each) for i in entries[many].tolist() for each in snapshot.extents(i)]
    more = np.zeros(len(parts), _ROW)
    more["entry"] = [entry for entry, _ in parts]
    for name in Extent._fields:
        more[name] = [getattr(extent, name) for _, extent in parts]
    return np.concatenate((rows, more))

"""A manifest is read as it was written, and a malformed one is one error that names the line."""

import csv
import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.format import manifest as module
from diesel_fs.format.entries import path_fault
from diesel_fs.format.manifest import as_csv, parse_manifest
from tests.examples import examples
from tests.rows import each_row

NAMES = st.text(st.sampled_from("aB,\"\t \r\n'é\U0001f600\udc80.;"), min_size=1, max_size=5)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TEXTS = st.text(st.sampled_from("aB,\"\t \r\n'é\U0001f600 019-"), min_size=1, max_size=5)
ROWS = st.lists(
    st.tuples(PATHS, TEXTS, st.text("xy, ", max_size=2)), min_size=1, max_size=9
).filter(lambda rows: not any(path_fault(encoded(path)) for path, _, _ in rows))


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def csv_of(rows: list[tuple[str, ...]], end: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
    return encoded(out.getvalue())


@examples(60)
@given(
    rows=ROWS, end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans(), blank=st.booleans(),
    batch=st.sampled_from([1, 2, 1 << 14]),
)  # fmt: skip
def test_a_manifest_is_read_as_it_was_written(
    rows: list[tuple[str, str, str]], end: str, mark: bool, blank: bool, batch: int
) -> None:
    header = ("more", "target", "path")
    content = csv_of([header, *((more, target, path) for path, target, more in rows)], end)
    content = b"\xef\xbb\xbf" * mark + content + b"\n" * blank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BATCH", batch)
        found = parse_manifest(content, "x.csv")
    assert [*found.paths] == [encoded(path) for path, _, _ in rows]
    assert [found.classes[at] for at in found.targets] == [target for _, target, _ in rows]
    line = 2
    for (path, target, more), shown in zip(rows, found.lines.tolist(), strict=True):
        assert shown == line
        line += 1 + (path + target + more).count("\n")
    assert as_csv(content, "x.csv") is content


PLAIN = st.text(st.sampled_from("aB,\"' é\udc80.;"), min_size=1, max_size=5).filter(
    lambda name: name not in (".", "..")
)
TEXT = st.text(st.sampled_from("aB,\"' é;"), min_size=1, max_size=5)


@examples(40)
@given(rows=st.lists(st.tuples(PLAIN, TEXT), min_size=1, max_size=6))
def test_a_table_with_tabs_means_the_same_as_its_csv(rows: list[tuple[str, str]]) -> None:
    content = b"path\ttarget\r\n" + b"".join(encoded(f"{a}\t{b}\r\n") for a, b in rows)
    found = parse_manifest(content, "x.tsv")
    assert [*found.paths] == [encoded(path) for path, _ in rows]
    assert [found.classes[at] for at in found.targets] == [target for _, target in rows]
    text = as_csv(content, "x.tsv").decode("utf-8", "surrogateescape")
    assert [*csv.reader(io.StringIO(text))] == [["path", "target"], *map(list, rows)]


@each_row(
    ("texts", "classes"),
    [
        (["10", "9", "-1", "9"], ["-1", "9", "10"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["1.5", "10", "9"], ["1.5", "10", "9"]),
    ],
)
def test_classes_are_sorted_as_numbers_if_they_are(texts: list[str], classes: list[str]) -> None:
    lines = "".join(f"{at},{text}\n" for at, text in enumerate(texts))
    found = parse_manifest(f"path,target\n{lines}".encode(), "x")
    assert found.classes == classes
    assert [classes[at] for at in found.targets] == texts


FAULTS = {
    "no line": (b"", "line 1: the header '' does not name"),
    "no header": (b"a.jpg,cat\n", "line 1: the header 'a.jpg,cat' does not name"),
    "other columns": (b"file_name,label\na,1\n", "line 1: the header"),
    "two targets": (b"path,target,target_path\na,1,b\n", "line 1: the header"),
    "a column twice": (b"path,path,target\na,1,b\n", "line 1: the header"),
    "JSON": (b'{"path": "a", "target": 1}\n', "line 1: the header"),
    "no sample": (b"path,target\n\n", "names no sample"),
    "UTF-16": ("path,target\na,1\n".encode("utf-16"), "is UTF-16"),
    "a field too few": (b"path,target\na,1\nb\n", "line 3: it has 1 fields, and the header 2"),
    "a field too many": (b"path,target\na,1,2\n", "line 2: it has 3 fields"),
    "no target": (b"path,target\na,1\nb,\n", "line 3: b has no target"),
    "no path": (b"path,target\n\n,1\n", "line 3: it has no path"),
    "an open quote": (b'path,target\na,"1\nb,2\n', "line 3: .*is a quote open"),
    "text behind a quote": (b'path,target\n"a"b,1\n', "line 2: .*is a quote open"),
    "old line ends": (b"path,target\ra,1\r", "line 1: "),
    "a long field": (b"path,target\na," + b"x" * 200_000 + b"\n", "line 2: field larger"),
    "a NUL in a path": (b"path,target\na\0b,1\n", r"line 2: bad path a\\x00b"),
    "a NUL in a target": (b"path,target\na,1\0\n", r"line 2: its target 1\\x00 has a NUL"),
    "a target of other bytes": (b"path,target\na,\xff\n", r"line 2: its target \\xff is not UTF-8"),
    "a long name": (b"path,target\n" + b"n" * 256 + b",1\n", "line 2: bad path n.*256 bytes"),
    "M1 an absolute path": (b"path,target\n/etc/passwd,1\n", "line 2: bad path /etc/passwd"),
    "M1 a path that leads out": (b"path,target\na,1\nb/../../x,1\n", "line 3: bad path .*'..'"),
    "M1 a folder's path": (b"path,target\na/,1\n", "line 2: bad path a/: it has an empty"),
    "M1 a target that leads out": (b"path,target_path\na,../b\n", r"line 2: bad path \.\./b"),
}  # fmt: skip


@each_row("case", FAULTS)
def test_M1_a_malformed_manifest_is_an_error_that_names_the_line(case: str) -> None:
    content, message = FAULTS[case]
    with pytest.raises(UsageError, match=message) as found:
        parse_manifest(content, "labels.csv")
    assert "labels.csv" in found.value.message
    assert len(found.value.message) < 1000


@examples(80)
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"path,target\n" + tail))
def test_any_bytes_are_a_manifest_or_one_error(content: bytes) -> None:
    try:
        found = parse_manifest(content, "x")
    except UsageError:
        return
    assert len(found) == len(found.paths) == len(found.targets) > 0
    assert not any(map(path_fault, found.paths))


def test_a_line_without_end_takes_no_memory() -> None:
    content = b"path,target\na,1\nb," + bytes(64 << 20)
    tracemalloc.start()
    with pytest.raises(UsageError, match="line 3: it has more than 1,048,576 bytes"):
        parse_manifest(content, "x")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_hundred_thousand_lines_are_columns() -> None:
    count = 100_000
    content = b"path,target\n" + b"".join(
        b"d%03d/%06d,%d\n" % (n % 7, n, n % 7) for n in range(count)
    )
    tracemalloc.start()
    found = parse_manifest(content, "x")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * count, "bytes for each line"
    assert peak < held + (24 << 20), "only some lines are Python objects at once"
    assert np.array_equal(found.targets, np.arange(count) % 7)
    assert found.paths[count - 1] == b"d%03d/%06d" % ((count - 1) % 7, count - 1)

"""Putting tars: every kind of entry, every kind of damage."""

import gzip
import io
import os
import subprocess
import tarfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, PutReport, TarSource
from diesel_fs.ingest.sources.members import hard_link_origins
from diesel_fs.repository.local import LocalRepository
from tests.rows import each_row
from tests.trees import odd_tree

Entry = tuple[str, bytes | tarfile.TarInfo]


def tar_of(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:  # noqa: A002
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, what in entries:
            info = what if isinstance(what, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(what, bytes):
                info.size, info.mtime = len(what), 7
            tar.addfile(info, io.BytesIO(what if isinstance(what, bytes) else b""))
    return out.getvalue()


def of_type(kind: bytes, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname, info.mode = kind, target, mode
    return info


def put(
    repository: LocalRepository, data: bytes, prefix: bytes = b"", **options: object
) -> PutReport:
    wanted = PutOptions(**options)  # type: ignore[arg-type]  # what came is passed on
    return ingest.put(repository, "pets", TarSource(io.BytesIO(data)), prefix, wanted)


def contents(repository: LocalRepository, name: str = "pets") -> dict[bytes, bytes | str]:
    """The content of a dataset: a file's bytes, a link's target, a folder's mode."""
    view = repository.view(name)
    reader = EntryReader(view, repository.objects, 1 << 20)
    found = {view.path(i): _content(view, reader, i) for i in range(1, len(view))}
    reader.close()
    return found


def _content(view: Snapshot, reader: EntryReader, index: int) -> bytes | str:
    match view.stat(index).kind:
        case Kind.FILE:
            return bytes(reader.read(index))
        case Kind.LINK:
            return os.fsdecode(view.link(index))
    return oct(view.stat(index).mode)


def reasons(report: PutReport) -> dict[bytes, str]:
    return dict(report.failed)


def test_gnu_tars_give_the_original_files(repository: LocalRepository, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "src")
    for form in ("gnu", "posix"):
        command = ["tar", "c", f"--format={form}", "-C", str(source), "."]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        put(repository, archive)
        ingest.put(repository, "tree", FolderSource(source))
        one, other = repository.view("pets"), repository.view("tree")
        assert [one.path(i) for i in range(len(one))] == [other.path(i) for i in range(len(other))]
        stats = [other.stat(i) for i in range(len(other))]
        if form == "posix":  # gnu knows whole seconds only
            assert [one.stat(i) for i in range(len(one))] == stats
        assert contents(repository).keys() == {other.path(i) for i in range(1, len(other))}
        assert contents(repository)[b"outside"] == "../../outside"
        assert contents(repository)[b"zeros"] == bytes(100_000)


def test_again_nothing_is_put(repository: LocalRepository) -> None:
    folder = of_type(tarfile.DIRTYPE, mode=0o700)
    entries: Sequence[Entry] = [
        ("d", folder), ("d/a", b"1"), ("l", of_type(tarfile.SYMTYPE, "d/a")),
        ("h", of_type(tarfile.LNKTYPE, "d/a")), ("empty", b""),
    ]  # fmt: skip
    first = put(repository, tar_of(*entries), b"in")
    assert (first.entries_found, first.entries, first.failed) == (5, 5, [])
    second = put(repository, tar_of(*entries), b"in")
    assert (second.entries_found, second.entries, second.unchanged) == (0, 0, 5)
    assert second.version == first.version
    changed = put(repository, tar_of(*entries[:1], ("d/a", b"2"), *entries[2:]), b"in")
    assert changed.unchanged == 5  # size and time are the same
    changed = put(repository, tar_of(("d/a", b"2"), *entries[2:]), b"in", checksum=True)
    assert (changed.files, changed.unchanged) == (2, 2)  # and the hard link with it
    assert contents(repository)[b"in/h"] == b"2"


def test_the_last_of_one_name_wins(repository: LocalRepository) -> None:
    put(repository, tar_of(("a", b"1"), ("b", b"old")))
    put(repository, tar_of(("a", b"22"), ("a", b"1"), ("b", b"x"), ("b", b"yy"), ("b", b"zzz")))
    assert contents(repository) == {b"a": b"1", b"b": b"zzz"}


def test_hard_links_are_files_with_the_same_bytes(repository: LocalRepository) -> None:
    report = put(
        repository,
        tar_of(
            ("big", b"x" * 200_000),
            ("one", of_type(tarfile.LNKTYPE, "./big")),
            ("two", of_type(tarfile.LNKTYPE, "one")),
            ("lost", of_type(tarfile.LNKTYPE, "nowhere")),
            ("loop", of_type(tarfile.LNKTYPE, "loop")),
            ("out", of_type(tarfile.LNKTYPE, "../../etc/passwd")),
            ("file", of_type(tarfile.LNKTYPE, "big")),
            ("file", b"a file after all"),
        ),
        b"in",
        chunk_bytes=65536,
    )
    found = contents(repository)
    assert found[b"in/one"] == found[b"in/two"] == found[b"in/big"] == b"x" * 200_000
    assert found[b"in/file"] == b"a file after all"
    assert sorted(reasons(report)) == [b"loop", b"lost", b"out"]
    assert repository.verify("pets").sound


def test_M1_names_that_lead_out_are_refused(repository: LocalRepository) -> None:
    names = ["../x", "/etc/x", "a/../../x", "a/./b", "a//b", "..", ".diesel/x", "n" * 256]
    report = put(repository, tar_of(*((name, b"evil") for name in names), ("./ok/\\", b"1")))
    assert sorted(reasons(report)) == sorted(name.encode() for name in names)
    assert all(reason.startswith("refused: ") for reason in reasons(report).values())
    assert contents(repository) == {b"ok": "0o755", b"ok/\\": b"1"}


def test_devices_and_unknown_kinds_are_named(repository: LocalRepository) -> None:
    kinds = [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"]
    entries = [(f"e{i}", of_type(kind)) for i, kind in enumerate(kinds)]
    report = put(repository, tar_of(*entries, ("ok", b"")))
    assert {path: reason.split(":")[0] for path, reason in report.failed} == dict.fromkeys(
        [b"e0", b"e1", b"e2", b"e3"], "skipped"
    )
    assert contents(repository) == {b"ok": b""}


def test_a_link_needs_a_target(repository: LocalRepository) -> None:
    bad = of_type(tarfile.SYMTYPE, "")
    worse = of_type(tarfile.SYMTYPE, "")
    worse.pax_headers = {"linkpath": "a\0b"}
    assert len(put(repository, tar_of(("a", bad), ("b", worse))).failed) == 2


def test_sparse_files_are_put_dense(repository: LocalRepository, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    for form in ("gnu", "posix"):
        command = ["tar", "cS", f"--format={form}", "-C", str(tmp_path), "sparse"]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        assert len(archive) < 100_000
        put(repository, archive, form.encode())
        assert contents(repository)[form.encode() + b"/sparse"] == bytes(1 << 20) + b"end"


@pytest.mark.parametrize(
    ("text", "mtime_ns"),
    [
        ("1.5", 1_500_000_000),
        ("-1.000000001", -1_000_000_001),
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("0.0000000019", 1),
        ("-0.0000000019", -2),
    ],
)
def test_times_are_exact(repository: LocalRepository, text: str, mtime_ns: int) -> None:
    info = of_type(tarfile.DIRTYPE)
    info.pax_headers = {"mtime": text}
    put(repository, tar_of(("a", info)))
    view = repository.view("pets")
    assert view.stat(view.lookup(b"a")).mtime_ns == mtime_ns


@each_row("text", ["nan", "inf", "1e999999999", "9" * 30, "-1e400"])
def test_malformed_times_are_refused(repository: LocalRepository, text: str) -> None:
    info = of_type(tarfile.DIRTYPE)
    info.pax_headers = {"mtime": text}
    report = put(repository, tar_of(("a", info), ("b", b"1")))
    assert reasons(report) == {b"a": "refused: its mtime cannot be stored"}
    assert contents(repository) == {b"b": b"1"}


def test_files_and_folders_do_not_hide_each_other(repository: LocalRepository) -> None:
    put(repository, tar_of(("f", b"1"), ("d/in", b"2"), ("g", b"3"), ("h", b"4")))
    folder = of_type(tarfile.DIRTYPE, mode=0o700)
    put(repository, tar_of(("e", folder)))
    report = put(
        repository,
        tar_of(
            ("d", b"a folder with entries"),
            ("e", b"an empty folder"),
            ("f/in", b"below a file"),
            ("g", folder),
            ("g/in", b"now it is a folder"),
            ("h", b"first a file again"),
            ("h/in", b"then a folder"),
            ("new", b"first a file"),
            ("new/in", b"then a folder"),
        ),
    )
    named = reasons(report)
    assert sorted(named) == [b"d", b"e", b"f/in", b"g", b"g/in", b"h/in", b"new"]
    assert named[b"g/in"] == "refused: g is a file of the dataset; remove it first"
    assert contents(repository) == {
        b"d": "0o755",
        b"d/in": b"2",
        b"e": "0o700",
        b"f": b"1",
        b"g": b"3",
        b"h": b"first a file again",
        b"new": "0o755",
        b"new/in": b"then a folder",
    }
    assert repository.verify("pets").problems == []


def test_with_delete_a_folder_takes_the_place_of_a_file(repository: LocalRepository) -> None:
    put(repository, tar_of(("f", b"1")))
    folder = of_type(tarfile.DIRTYPE, mode=0o700)
    assert put(repository, tar_of(("f", folder)), delete=True).failed == []
    assert contents(repository) == {b"f": "0o700"}
    assert repository.verify("pets").notes == []


def test_files_in_a_row_that_are_left_out(repository: LocalRepository) -> None:
    """Plain files of one folder are put together, except with filters."""
    put(repository, tar_of(("a.jpg", b"1"), ("x/c.jpg", b"4")))
    put(repository, tar_of(("x/d.jpg", b"5"), ("y/e.txt", b"6")), exclude=("x", "*.txt"))
    assert sorted(contents(repository)) == [b"a.jpg", b"x", b"x/c.jpg"]


WHOLE = tar_of(("a", b"1" * 600), ("b", b"2" * 600), ("c", b"3" * 600))


@pytest.mark.parametrize("length", [513, 1024, 1536, 1537, 2048, 2560, 3000, 3072, 4608])
def test_a_truncated_tar_gives_its_first_entries(repository: LocalRepository, length: int) -> None:
    put(repository, tar_of(("old", b"1")))
    report = put(repository, WHOLE[:length], delete=True)
    (path, reason) = report.failed[-1]
    assert path == b""
    assert reason.startswith("the tar is damaged or cut off")
    whole = [name for name, end in ((b"a", 1112), (b"b", 2648), (b"c", 4184)) if length >= end]
    assert sorted(contents(repository)) == sorted([*whole, b"old"])
    assert repository.verify("pets").sound


def test_damage_inside_is_not_the_end(repository: LocalRepository) -> None:
    damaged = bytearray(WHOLE)
    damaged[1536 + 10] ^= 1  # in the second header's name
    report = put(repository, bytes(damaged))
    assert "bad checksum" in reasons(report)[b""]
    packed = bytearray(gzip.compress(tar_of(("x", b"1"), ("y", os.urandom(100_000)))))
    packed[-6] ^= 1  # in the checksum behind the data
    report = put(repository, bytes(packed))
    assert "checksum" in reasons(report)[b""]
    assert b"x" in contents(repository)


@each_row("data", [b"", b"x", b"no tar" * 1000, b"\x1f\x8b", gzip.compress(b"x" * 999, mtime=0)])
def test_another_format_is_refused(repository: LocalRepository, data: bytes) -> None:
    with pytest.raises(UsageError, match="the input is no tar"):
        put(repository, data)


def test_the_stream_stays_open_for_its_owner(repository: LocalRepository) -> None:
    stream = io.BytesIO(WHOLE)
    ingest.put(repository, "pets", TarSource(stream))
    assert not stream.closed
    assert stream.read() == b""


def bomb(kind: bytes, body: bytes, repeat: int = 1) -> bytes:
    """A tar that begins with an extended header of this body, and then holds a file `x`."""
    info = tarfile.TarInfo("h")
    info.type, info.size = kind, len(body) * repeat
    out = io.BytesIO()
    with gzip.open(out, "wb", 1) as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(repeat):
            file.write(body)
        file.write(
            bytes(-len(body) * repeat % 512) + tar_of(("x", b"1"), format=tarfile.GNU_FORMAT)
        )
    return out.getvalue()


LONG = {
    "pax": (tarfile.XHDTYPE, b"%d k=%s\n" % (1 << 20, b"x" * ((1 << 20) - 11)), 64),
    "global": (tarfile.XGLTYPE, b"%d k=%s\n" % (1 << 20, b"x" * ((1 << 20) - 11)), 64),
    "long name": (tarfile.GNUTYPE_LONGNAME, bytes(1 << 20), 64),
    "long link": (tarfile.GNUTYPE_LONGLINK, bytes(1 << 20), 64),
    "records that overlap": (tarfile.XHDTYPE, b"2 " * 20_000 + b"=\n", 1),
    "digits": (tarfile.XHDTYPE, b"30005 k=%s\n" % (b"1" * 29_996), 1),
    "no number": (tarfile.XHDTYPE, b"x k=1\n", 1),
}


@each_row("name", LONG)
def test_M10_a_header_is_not_read_into_memory_whole(repository: LocalRepository, name: str) -> None:
    kind, body, repeat = LONG[name]
    data = bomb(kind, body, repeat)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="the input is no tar"):
            put(repository, data, chunk_bytes=1 << 16)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


def test_M10_headers_in_a_row_are_counted(repository: LocalRepository) -> None:
    one = tarfile.TarInfo("h")
    one.type, one.size = tarfile.XHDTYPE, 6
    header = one.tobuf(tarfile.USTAR_FORMAT) + b"6 k=1\n".ljust(512, b"\0")
    good = tar_of(("x", b"1"), format=tarfile.GNU_FORMAT)
    assert put(repository, header * 10 + good).files == 1
    with pytest.raises(UsageError, match="headers in a row"):
        put(repository, header * 400 + good)
    report = put(repository, good[:1024] + header * 400 + good)
    assert "headers in a row" in reasons(report)[b""]


def test_M10_hard_links_in_a_row_take_linear_time(repository: LocalRepository) -> None:
    count = 20_000
    links = {b"%d" % i: b"%d" % (i + 1) for i in range(count)}
    start_s = time.process_time()
    assert set(hard_link_origins(links).values()) == {b"%d" % count}
    ring = {b"%d" % i: b"%d" % ((i + 1) % count) for i in range(count)}
    assert len(set(hard_link_origins(ring).values())) == 1
    assert time.process_time() - start_s < 5  # it would take minutes
    chain = [(f"l{i}", of_type(tarfile.LNKTYPE, f"l{i + 1}" if i < 9 else "x")) for i in range(10)]
    put(repository, tar_of(*chain, ("x", b"all")))
    assert set(contents(repository).values()) == {b"all"}


def test_files_larger_than_a_read_stand_between_small_ones(repository: LocalRepository) -> None:
    sizes = [100, 5 << 20, 0, 1, 3 << 20, 512, 4 << 20, (4 << 20) - 512, 700_000, 9 << 20, 3]
    expected = {b"d/%d" % i: bytes([i + 1]) * size for i, size in enumerate(sizes)}
    data = tar_of(*((path.decode(), content) for path, content in expected.items()))
    for chunk_bytes in (64 << 10, 1 << 20, 4 << 20):
        assert put(repository, data, b"%d" % chunk_bytes, chunk_bytes=chunk_bytes).failed == []
    found = contents(repository)
    for chunk_bytes in (64 << 10, 1 << 20, 4 << 20):
        prefix = b"%d/" % chunk_bytes
        assert all(found[prefix + path] == content for path, content in expected.items())


def test_names_in_any_order_and_again_in_another(repository: LocalRepository) -> None:
    """Metadata stores keep files of one folder together, by name, whatever comes between them."""
    names = [f"d{i % 3}/f{(i * 7919) % 1000:03}" for i in range(900)]
    links = {f"d{i}/f{k}5x": of_type(tarfile.SYMTYPE, "f") for i in range(3) for k in range(40, 60)}
    entries: list[Entry] = [(name, name.encode()) for name in names]
    for place, link in enumerate(links.items()):
        entries.insert(place * 13, link)
    assert put(repository, tar_of(*entries)).failed == []
    expected: dict[bytes, bytes | str] = {name.encode(): name.encode() for name in names}
    expected |= {name.encode(): "f" for name in links}
    some = [(name, b"new" + name.encode()) for name in names[::-3]]
    assert put(repository, tar_of(*some)).failed == []
    expected |= {name.encode(): content for name, content in some}
    found = contents(repository)
    assert {path: what for path, what in found.items() if b"/" in path} == expected
    assert repository.verify("pets").sound

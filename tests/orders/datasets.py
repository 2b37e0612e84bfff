"""Snapshots for tests of orders, with known places of files in chunks."""

from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from tests.format.snapshot.oracle import OwnEntry, Part, build


def stored_part(chunk: int, place: int, size: int = 100) -> Part:
    return Part(chunk, 4096 + 100 * place, size, 0, chunk * 1000 + place, size)


def dataset(chunks: int, per_chunk: int, *, folders: int = 7) -> Snapshot:
    """Files `dF/CCCC-PPP`: the P-th file of chunk C + 1, in folder (C + P) modulo `folders`."""
    state = {
        b"d%d/%04d-%03d" % ((chunk + place) % folders, chunk, place): OwnEntry(
            Kind.FILE, parts=(stored_part(chunk + 1, place),)
        )
        for chunk in range(chunks)
        for place in range(per_chunk)
    }
    return Snapshot(build(None, state, list(range(1, chunks + 1))))


def odd_dataset() -> Snapshot:
    """Empty files, links, folders, a file of many extents, and a chunk without files."""
    state = {
        b"": OwnEntry(Kind.FOLDER, 0o755),
        b"a/empty": OwnEntry(Kind.FILE),  # in the chunk HOME, 3
        b"a/large": OwnEntry(
            Kind.FILE, parts=tuple(stored_part(chunk, 0, 1 << 16) for chunk in (1, 2, 5))
        ),
        b"a/link": OwnEntry(Kind.LINK, target=b"large"),
        b"a/small": OwnEntry(Kind.FILE, parts=(stored_part(5, 1),)),
        b"b/also empty": OwnEntry(Kind.FILE),
        b"b/deep/er/file": OwnEntry(Kind.FILE, parts=(stored_part(4, 0),)),
        b"b/nothing here": OwnEntry(Kind.FOLDER, 0o755),
        b"top": OwnEntry(Kind.FILE, parts=(stored_part(4, 1),)),
    }
    return Snapshot(build(None, state, [1, 2, 3, 4, 5, 6]))

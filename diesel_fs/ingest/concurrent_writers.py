"""Mends paths that two writers made at once, one as a file and the other as a folder.

A put refuses such a path where it can see it (`compare.py`), but it cannot see what another writer
commits while it runs. Of the two entries the one with the greater stamp wins (a stamp orders all
entries of a dataset), so a folder would replace the file for good. Therefore a writer that finishes
looks for files that a folder has replaced since it began, where one of the two is its own, and puts
the file again. Then readers show the folder, as wherever a path is both; `verify` and the put name
the path. Each of two writers looks after its own last commit, so at least one of them sees both.

Headers of chunks are read only where somebody else wrote meanwhile, and those of own chunks only
where such a path may be in them. One thread.
"""

import io
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..cache.reader import EntryFile, EntryReader
from ..errors import FormatError, ObjectMissing
from ..format.chunk import CHUNK_BYTES_DEFAULT, Header
from ..format.chunk_id import chunk_id_text
from ..format.entries import ChunkId, ChunkInfo, Kind, Rows, Stamp, split
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..repository.interface import Repository
from ..repository.writing import WriteSession
from .options import PutReport
from .packer import start_packer

log = logging.getLogger("diesel.ingest")

_MEMORY_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class _Entry(NamedTuple):
    """An entry of a new chunk: `place` in `header`."""

    stamp: Stamp
    header: Header
    place: int
    own: bool

    @property
    def kind(self) -> Kind:
        return Kind(int(self.header.records["kind"][self.place]))


def finish_put(
    repository: Repository, session: WriteSession, report: PutReport, prefix: bytes = b""
) -> bool:
    """`session.finish`, then put again the files that folders have replaced; the report names them.

    Returns whether others have written since the session began. Then go on with a new session: this
    one would look at all new chunks each time. `session.view` must have been loaded when the
    session began.
    """
    report.version = session.finish()
    if not session.others_committed():
        return False
    lost = _files_replaced_by_folders(repository, session)
    if lost:
        _put_again(repository, session, lost)
        report.version = session.finish()
    for path in lost:
        below = path.removeprefix(prefix + b"/") if prefix else path
        report.fail(below, "it is a file and a folder now, since another writer put it, too")
    return True


def _put_again(
    repository: Repository, session: WriteSession, lost: dict[bytes, list[_Entry]]
) -> None:
    log.warning(
        "folders replaced these files, which are put again: %s",
        ", ".join(map(shown, lost)),
    )
    view = _view(session, lost)
    reader = EntryReader(view, repository.objects, _MEMORY_BYTES)
    packer = start_packer(session, CHUNK_BYTES_DEFAULT, "auto")
    try:
        for path in lost:
            index = view.lookup(path)
            found = view.stat(index)
            if found.kind == Kind.LINK:
                packer.add_link_to(split(path), found.mtime_ns, view.link(index))
                continue
            content = io.BufferedReader(EntryFile(reader, index), _READ_BYTES)
            packer.add_stream(content, found.size, split(path), found.mode, found.mtime_ns)
        packer.finish()
    finally:
        packer.close()
        reader.close()


def _files_replaced_by_folders(
    repository: Repository, session: WriteSession
) -> dict[bytes, list[_Entry]]:
    """The extents of each file that a folder has replaced, one of the two by this session."""
    before, after = session.view, repository.view(session.name)
    own = session.committed_chunks
    new = set(after.chunk_ids).difference(before.chunk_ids)
    theirs = list(_headers(repository, session, new.difference(own)))
    shadowed = set(after.shadowing_folders().tolist())
    suspects = {
        path
        for header in theirs
        for path in _possible_conflicts(header, session)
        if (index := after.lookup(path)) >= 0
        and after.stat(index).kind == Kind.FOLDER
        and index not in shadowed
    }
    if not suspects:
        return {}
    entries = defaultdict[bytes, list[_Entry]](list)
    ours = _headers(repository, session, new.intersection(own))
    for headers, is_own in ((theirs, False), (ours, True)):
        for header in headers:
            for place in range(len(header)):
                if (path := header.path(place)) in suspects:
                    entries[path].append(_Entry(header.stamp(place), header, place, is_own))
    lost = {path: _replaced(found) for path, found in entries.items()}
    return {path: extents for path, extents in sorted(lost.items()) if extents}


def _possible_conflicts(header: Header, session: WriteSession) -> Iterator[bytes]:
    """The paths of a chunk of another writer that may be in conflict: its files and links, and its
    folders that stand in a folder in which this session has committed something."""
    kinds = header.records["kind"]
    for place in np.flatnonzero((kinds == Kind.FILE) | (kinds == Kind.LINK)).tolist():
        yield header.path(place)
    for place in np.flatnonzero(kinds == Kind.FOLDER).tolist():
        if header.folders[header.folder[place]] in session.folders:
            yield header.path(place)


def _replaced(entries: list[_Entry]) -> list[_Entry]:
    """The extents of the newest file or link among the entries of one path; empty unless the newest
    entry of all is a folder, one of the two is our own, and nobody has deleted the file between
    them."""
    newest = max(entries, key=lambda entry: (entry.stamp, entry.header.preamble.id))
    files = [entry for entry in entries if entry.kind in (Kind.FILE, Kind.LINK)]
    if newest.kind != Kind.FOLDER or not files:
        return []
    last = max(entry.stamp for entry in files)
    extents = {
        entry.header.extents[entry.place].number
        if entry.place in entry.header.extents
        else 0: entry
        for entry in files
        if entry.stamp == last
    }
    first = next(iter(extents.values()))
    is_whole = len(extents) == int(first.header.records["extents"][first.place])
    is_deleted = any(entry.kind == Kind.TOMBSTONE and entry.stamp > last for entry in entries)
    if is_deleted or not is_whole or not (newest.own or first.own):
        return []
    return [extents[number] for number in sorted(extents)]


def _headers(
    repository: Repository, session: WriteSession, chunks: Iterable[ChunkId]
) -> Iterator[Header]:
    for chunk in sorted(chunks):
        try:
            yield repository.read_header(session.identity, chunk)
        except (FormatError, ObjectMissing) as error:  # it must not stop the put
            log.warning(
                "conflicts in chunk %s are not looked for: %s",
                chunk_id_text(chunk),
                error.message,
            )


def _view(session: WriteSession, lost: dict[bytes, list[_Entry]]) -> Snapshot:
    """A snapshot with these files only."""
    folders: dict[bytes, int] = {}
    chunks: dict[ChunkInfo, int] = {}
    folder, chunk, tails = list[int](), list[int](), dict[int, bytes]()
    for i, (path, extents) in enumerate(lost.items()):
        folder.append(folders.setdefault(split(path)[0], len(folders)))
        numbers = [chunks.setdefault(_chunk_of(entry), len(chunks)) for entry in extents]
        chunk.append(numbers[0])
        if tail := b"".join(entry.header.tail(entry.place) for entry in extents):
            tails[i] = tail
    rows = Rows(
        list(folders),
        np.array(folder, np.uint32),
        [split(path)[1] for path in lost],
        np.array([entry.header.records[entry.place] for entry, *_ in lost.values()]),
        np.array(chunk, np.uint32),
        [info.id for info in chunks],
        tails,
    )
    parts = build_snapshot(
        None, rows, list(chunks), identity=session.identity, dataset=session.name, version=1,
        digest=0,
    )  # fmt: skip
    return Snapshot(memoryview(b"".join(parts)), verify=True)


def _chunk_of(entry: _Entry) -> ChunkInfo:
    preamble = entry.header.preamble
    return ChunkInfo(preamble.id, preamble.object_bytes)

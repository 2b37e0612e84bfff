"""Mends paths that two writers made at once, one as a file and the other as a folder.

A put refuses such a path when it sees the conflict (`compare.py`), but it cannot see the commits of
other writers while it runs. Of two entries at one path the one with the greater stamp (see
FORMAT.md) wins, so a folder would replace the file for good. Therefore a writer that finishes looks
for files that a folder has replaced since the put began, if the file or the folder is its own, and
puts the file again. Then the file's bytes stay in the dataset, although readers still show the
folder; `verify` and the report of the put name the path. Each of two writers checks after its own
last commit, so at least one of them sees both entries.

Headers of other writers' chunks are read only if somebody else wrote during the put, and own
headers only if such a path may be in them. One thread.
"""

import io
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..cache.readers.entry_file import EntryFile
from ..cache.readers.entry_reader import EntryReader
from ..errors import FormatError, ObjectMissing
from ..format.chunk import CHUNK_BYTES_DEFAULT, ChunkHeader
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

_MEMORY_BYTES = 64 << 20  # for chunks
_READ_BYTES = 1 << 20  # of a file that is put again


class _Entry(NamedTuple):
    """`position` is in the chunk's header."""

    stamp: Stamp
    header: ChunkHeader
    position: int
    is_own: bool

    @property
    def kind(self) -> Kind:
        return Kind(int(self.header.records["kind"][self.position]))


def finish_put(
    repository: Repository, session: WriteSession, report: PutReport, prefix: bytes = b""
) -> bool:
    """Finish the session, then put replaced files again. The report names them by their paths below
    `prefix`, the source's path in the dataset.

    Returns whether others have written since the session began. If so, continue with a new session:
    this one would look at all new chunks each time. `session.view` must have been loaded at the
    session's beginning.
    """
    report.version = session.finish()
    if not session.others_committed():
        return False
    replaced = _files_replaced_by_folders(repository, session)
    if replaced:
        _put_again(repository, session, replaced)
        report.version = session.finish()
    for path in replaced:
        below = path.removeprefix(prefix + b"/") if prefix else path
        report.fail(below, "it is a file and a folder now, since another writer put it, too")
    return True


def _put_again(
    repository: Repository, session: WriteSession, replaced: dict[bytes, list[_Entry]]
) -> None:
    log.warning(
        "folders replaced these files, which are put again: %s", ", ".join(map(shown, replaced))
    )
    view = _snapshot_of(session, replaced)
    reader = EntryReader(view, repository.objects, _MEMORY_BYTES)
    packer = start_packer(session, CHUNK_BYTES_DEFAULT, "auto")
    try:
        for path in replaced:
            index = view.lookup(path)
            found = view.stat(index)
            if found.kind == Kind.LINK:
                packer.add_known_link(split(path), found.mtime_ns, view.link(index))
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
    """Files and links that a folder has replaced, with the entries of their extents, if one of the
    two is this session's."""
    before, after = session.view, repository.view(session.name)
    new = set(after.chunk_ids).difference(before.chunk_ids)
    theirs = list(_headers(repository, session, new - session.committed_chunks))
    # The folders that hide a file: there the file is already kept
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
    ours = _headers(repository, session, new & session.committed_chunks)
    for headers, is_own in ((theirs, False), (ours, True)):
        for header in headers:
            for i in range(len(header)):
                if (path := header.path(i)) in suspects:
                    entries[path].append(_Entry(header.stamp(i), header, i, is_own))
    replaced = {path: _replaced_extents(found) for path, found in sorted(entries.items())}
    return {path: extents for path, extents in replaced.items() if extents}


def _possible_conflicts(header: ChunkHeader, session: WriteSession) -> Iterator[bytes]:
    """The files and links of another writer's chunk, and its folders inside a folder to which this
    session has committed something."""
    kinds = header.records["kind"]
    for i in np.flatnonzero((kinds == Kind.FILE) | (kinds == Kind.LINK)).tolist():
        yield header.path(i)
    for i in np.flatnonzero(kinds == Kind.FOLDER).tolist():
        if header.folders[header.folder[i]] in session.folders:
            yield header.path(i)


def _replaced_extents(entries: list[_Entry]) -> list[_Entry]:
    """The extents of the newest file or link at one path. Empty unless the newest entry is a
    folder, the file or the folder is this session's, the file is complete, and nobody has deleted
    it after it was put."""
    newest = max(entries, key=lambda entry: (entry.stamp, entry.header.preamble.id))
    files = [entry for entry in entries if entry.kind in (Kind.FILE, Kind.LINK)]
    if newest.kind != Kind.FOLDER or not files:
        return []
    last = max(entry.stamp for entry in files)
    extents = {
        entry.header.extents[entry.position].number
        if entry.position in entry.header.extents
        else 0: entry
        for entry in files
        if entry.stamp == last
    }
    first = next(iter(extents.values()))
    is_whole = len(extents) == int(first.header.records["extents"][first.position])
    is_deleted = any(entry.kind == Kind.TOMBSTONE and entry.stamp > last for entry in entries)
    if is_deleted or not is_whole or not (newest.is_own or first.is_own):
        return []
    return [extents[number] for number in sorted(extents)]


def _headers(
    repository: Repository, session: WriteSession, chunks: Iterable[ChunkId]
) -> Iterator[ChunkHeader]:
    for chunk in sorted(chunks):
        try:
            yield repository.read_header(session.identity, chunk)
        except (FormatError, ObjectMissing) as error:  # a bad chunk must not stop the put
            log.warning(
                "conflicts in chunk %s are not looked for: %s", chunk_id_text(chunk), error.message
            )


def _snapshot_of(session: WriteSession, files: dict[bytes, list[_Entry]]) -> Snapshot:
    """The dataset's own snapshot shows folders at the paths of these files, so this one has the
    files alone."""
    folders: dict[bytes, int] = {}
    chunks: dict[ChunkInfo, int] = {}
    folder, chunk, tails = list[int](), list[int](), dict[int, bytes]()
    for i, (path, extents) in enumerate(files.items()):
        folder.append(folders.setdefault(split(path)[0], len(folders)))
        preambles = [entry.header.preamble for entry in extents]
        infos = [ChunkInfo(each.id, each.object_bytes) for each in preambles]
        numbers = [chunks.setdefault(info, len(chunks)) for info in infos]
        chunk.append(numbers[0])
        if tail := b"".join(entry.header.tail(entry.position) for entry in extents):
            tails[i] = tail
    rows = Rows(
        list(folders),
        np.array(folder, np.uint32),
        [split(path)[1] for path in files],
        np.array([entry.header.records[entry.position] for entry, *_ in files.values()]),
        np.array(chunk, np.uint32),
        [info.id for info in chunks],
        tails,
    )
    parts = build_snapshot(
        None, rows, list(chunks), identity=session.identity, dataset=session.name, version=1,
        digest=0,
    )  # fmt: skip
    return Snapshot(memoryview(b"".join(parts)), verify=True)

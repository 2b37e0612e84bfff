"""Checks and stores the manifest of a put, after the files that it names.

`sources/manifest_file.py` checks its form before anything is put. Whether the dataset has the named
files is known only afterwards. The manifest becomes the file
`MANIFEST_NAME` in the folder to which the source went.
"""

import io
from dataclasses import dataclass

from ..format.entries import Kind, join, split
from ..format.manifest import MANIFEST_NAME, Manifest, find_samples
from ..format.snapshot.reader import Snapshot, same_content
from ..repository.writing import WriteSession
from .options import PutOptions, PutReport
from .packer import start_packer

_MODE = 0o644


@dataclass(frozen=True, slots=True)
class FetchedManifest:
    """A manifest (a table of samples and their targets), and its bytes, which are stored."""

    manifest: Manifest
    content: bytes
    modified_ns: int

    def path(self, target: bytes) -> bytes:
        return join(target, MANIFEST_NAME)


def put_manifest(
    session: WriteSession,
    fetched: FetchedManifest,
    target: bytes,
    options: PutOptions,
    view: Snapshot,
    report: PutReport,
    *,
    is_readable: bool,
) -> None:
    """Put a manifest unless the dataset has it already and it `is_readable` there. If `view`, the
    dataset after the put, lacks files that the manifest names, the report gets the first such
    lines, and a stored manifest stays. Raises DieselError."""
    found = find_samples(fetched.manifest, view, target)
    for fault in found.faults:
        report.fail(fault.path, f"{fetched.manifest.name}, line {fault.line}: {fault.reason}")
    path = fetched.path(target)
    if found.fault_count:
        lines = f"{found.fault_count:,} of {len(fetched.manifest):,} lines"
        report.fail(MANIFEST_NAME, f"the manifest is not stored: {lines} are at fault")
        return
    index = view.lookup(path)
    if index >= 0 and view.stat(index).kind == Kind.FOLDER:
        report.fail(MANIFEST_NAME, "the manifest is not stored: a folder stands at its path")
        return
    report.samples = len(fetched.manifest)
    if index >= 0 and is_readable and _is_same(view, index, fetched.content):
        report.unchanged += 1
        return
    packer = start_packer(session, options.chunk_bytes, options.compress, report.add_chunk)
    try:
        size = len(fetched.content)
        packer.add_stream(
            io.BytesIO(fetched.content), size, split(path), _MODE, fetched.modified_ns
        )
        packer.finish()
    finally:
        packer.close()
    report.version = session.finish()


def _is_same(view: Snapshot, index: int, content: bytes) -> bool:
    found = view.stat(index)
    if (found.kind, found.size) != (Kind.FILE, len(content)):
        return False
    return same_content(view.extents(index), lambda size, start: content[start : start + size])

"""Fetches the manifest of a put from any place that archives have, compressed or not."""

import contextlib
from typing import BinaryIO, cast

from ...errors import CorruptError, DieselError, ObjectStoreError, UsageError
from ...format.manifest import MANIFEST_BYTES_MAX, as_csv, parse_manifest
from ..manifest import FetchedManifest
from .archives import Archive
from .compression import BROKEN_STREAM, decompressed

_READ_BYTES = 1 << 20


def fetch_manifest(file: Archive) -> FetchedManifest:
    """Raises UsageError for a file that is no manifest, CorruptError if it is damaged or has
    another SHA-256 than its address gives, NotFoundError, PermissionDenied, ObjectStoreError."""
    state = file.look()
    try:
        with contextlib.closing(file.open(state)) as opened:
            with contextlib.closing(decompressed(cast("BinaryIO", opened))) as stream:
                content = _read(cast("BinaryIO", stream), file.name)
            sha256 = opened.sha256() if file.sha256 else b""
    except BROKEN_STREAM as error:
        if isinstance(error.__cause__, DieselError):
            raise error.__cause__ from error
        kind = CorruptError if file.is_local else ObjectStoreError
        raise kind(f"the manifest {file.name} is damaged or cut off: {error}") from error
    if file.sha256 != sha256:
        raise CorruptError(
            f"the SHA-256 of the manifest {file.name} is {sha256.hex()}, not {file.sha256.hex()}"
        )
    manifest = parse_manifest(content, file.name)
    return FetchedManifest(manifest, as_csv(content, file.name), state.modified_ns)


def _read(stream: BinaryIO, name: str) -> bytes:
    content = bytearray()
    while part := stream.read(_READ_BYTES):
        content += part
        if len(content) > MANIFEST_BYTES_MAX:
            raise UsageError(f"the manifest {name} has more than {MANIFEST_BYTES_MAX >> 30} GiB")
    return bytes(content)

"""Makes and parses the names of all objects in an object store (FORMAT.md, section 2)."""

import re
from typing import NamedTuple
from uuid import UUID

from .chunk_id import TEXT_CHARS, chunk_id_text, parse_chunk_id
from .entries import ChunkId

DATASETS = "datasets/"
DELETED = "deleted/"
STORE_MARKER = "DIESEL-STORE"
IDENTITY_TEXT = r"[0-9a-f]{32}"
_PREFIX_CHARS = 4  # of a chunk ID's text, which name its folder (256 seconds)

# Other names are foreign: never written, listed, read or deleted. A new kind of object needs a line
# here and in FORMAT.md; older programs treat it as foreign
_ID_CHARACTER = r"[0-9A-Za-z_-]"
_DATASET = rf"datasets/{IDENTITY_TEXT}"
_OBJECTS = {
    "marker": re.escape(STORE_MARKER),
    "dataset": rf"{_DATASET}/DATASET",
    "chunk": rf"{_DATASET}/chunks/(?P<prefix>{_ID_CHARACTER}{{{_PREFIX_CHARS}}})"
    rf"/(?P=prefix){_ID_CHARACTER}{{{TEXT_CHARS - _PREFIX_CHARS}}}",
    "snapshot": rf"{_DATASET}/snapshots/[0-9a-f]{{16}}(-[0-9a-f]{{16}})?",
    "archive": rf"{_DATASET}/archives/[0-9a-f]{{32}}",
    "lease": rf"{_DATASET}/leases/[0-9A-Za-z_-]{{1,64}}",
    "deleted": rf"deleted/{IDENTITY_TEXT}",
}
OBJECT_NAME = re.compile("|".join(_OBJECTS.values()))
FOLDER_NAME = re.compile(
    rf"datasets(/{IDENTITY_TEXT}(/(chunks(/{_ID_CHARACTER}{{{_PREFIX_CHARS}}})?|snapshots|archives|leases))?)?"
    r"|deleted"
)
_VERSION = re.compile(r"([0-9a-f]{16})(?:-([0-9a-f]{16}))?")
LEASE_NAME = re.compile(_OBJECTS["lease"])
MUTABLE_NAME = re.compile(f"{_OBJECTS['lease']}|{_OBJECTS['archive']}")
"""All other objects never change."""


def dataset_object(identity: UUID) -> str:
    return f"{dataset_prefix(identity)}DATASET"


def deleted_object(identity: UUID) -> str:
    return f"{DELETED}{identity.hex}"


def dataset_prefix(identity: UUID) -> str:
    return f"{DATASETS}{identity.hex}/"


def chunk_prefix(identity: UUID) -> str:
    return f"{dataset_prefix(identity)}chunks/"


def chunk_object(identity: UUID, chunk: ChunkId) -> str:
    """Names sort as IDs do."""
    text = chunk_id_text(chunk)
    return f"{chunk_prefix(identity)}{text[:_PREFIX_CHARS]}/{text}"


def chunk_of_object(name: str) -> ChunkId | None:
    """The chunk whose object has this name; None for other names."""
    parts = name.rsplit("/", 2)
    try:
        chunk = parse_chunk_id(parts[-1])
    except ValueError:
        return None
    return chunk if len(parts) == 3 and parts[1] == parts[2][:_PREFIX_CHARS] else None


def snapshot_prefix(identity: UUID) -> str:
    return f"{dataset_prefix(identity)}snapshots/"


class VersionForm(NamedTuple):
    """One form in which a version is published: its snapshot (`base` 0), or the delta from an
    earlier version."""

    version: int
    base: int


def snapshot_object(identity: UUID, version: int) -> str:
    """Names sort as versions do."""
    return version_object(identity, VersionForm(version, 0))


def version_object(identity: UUID, form: VersionForm) -> str:
    base = f"-{form.base:016x}" if form.base else ""
    return f"{snapshot_prefix(identity)}{form.version:016x}{base}"


def version_of_object(name: str) -> VersionForm | None:
    """None for names that are neither a snapshot's nor a delta's."""
    found = _VERSION.fullmatch(name.rpartition("/")[2])
    if found is None:
        return None
    if found[2] is None:
        return VersionForm(int(found[1], 16), 0)
    form = VersionForm(int(found[1], 16), int(found[2], 16))
    return form if 0 < form.base < form.version else None


def archive_prefix(identity: UUID) -> str:
    return f"{dataset_prefix(identity)}archives/"


def archive_object(identity: UUID, name: str) -> str:
    return f"{archive_prefix(identity)}{name}"


def lease_prefix(identity: UUID) -> str:
    return f"{dataset_prefix(identity)}leases/"


def lease_object(identity: UUID, name: str) -> str:
    return f"{lease_prefix(identity)}{name}"


def identity_of_object(name: str) -> UUID | None:
    """The identity in an object's name (its second component); None if it is no identity."""
    parts = name.split("/")
    try:
        return UUID(hex=parts[1]) if len(parts) > 1 and len(parts[1]) == 32 else None
    except ValueError:
        return None

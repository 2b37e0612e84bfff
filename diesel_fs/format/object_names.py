"""Where things lie in an object store: the names of FORMAT.md, section 2, both directions.

Pure functions of identities, IDs and versions.
"""

import re
from uuid import UUID

from .chunk_id import TEXT_CHARS, chunk_id_text, parse_chunk_id
from .entries import ChunkId

DATASETS = "datasets/"
DELETED = "deleted/"
STORE_MARKER = "DIESEL-STORE"
IDENTITY_TEXT = r"[0-9a-f]{32}"
_PREFIX_CHARS = 4  # of a chunk ID's text: 256 seconds

# A name that is not in here is not ours: never written, listed, read or deleted. A new sort of
# object is a line here and in FORMAT.md; older programs will call it foreign.
_OF_CHUNK_ID = r"[0-9A-Za-z_-]"
_DATASET = rf"datasets/{IDENTITY_TEXT}"
_OBJECTS = {
    "marker": re.escape(STORE_MARKER),
    "dataset": rf"{_DATASET}/DATASET",
    "chunk": rf"{_DATASET}/chunks/(?P<prefix>{_OF_CHUNK_ID}{{{_PREFIX_CHARS}}})"
    rf"/(?P=prefix){_OF_CHUNK_ID}{{{TEXT_CHARS - _PREFIX_CHARS}}}",
    "snapshot": rf"{_DATASET}/snapshots/[0-9a-f]{{16}}",
    "lease": rf"{_DATASET}/leases/[0-9A-Za-z_-]{{1,64}}",
    "deleted": rf"deleted/{IDENTITY_TEXT}",
}
OBJECT_NAME = re.compile("|".join(_OBJECTS.values()))
FOLDER_NAME = re.compile(
    rf"datasets(/{IDENTITY_TEXT}(/(chunks(/{_OF_CHUNK_ID}{{{_PREFIX_CHARS}}})?|snapshots|leases))?)?"
    r"|deleted"
)
MUTABLE_NAME = re.compile(_OBJECTS["lease"])
"""The only objects whose bytes may change."""


def dataset_object(identity: UUID) -> str:
    """The object that holds a dataset's name."""
    return f"{DATASETS}{identity.hex}/DATASET"


def deleted_object(identity: UUID) -> str:
    """The object that says: this dataset is deleted."""
    return f"{DELETED}{identity.hex}"


def dataset_prefix(identity: UUID) -> str:
    """What the names of all objects of a dataset begin with."""
    return f"{DATASETS}{identity.hex}/"


def chunk_prefix(identity: UUID) -> str:
    """What the names of a dataset's chunks begin with."""
    return f"{DATASETS}{identity.hex}/chunks/"


def chunk_object(identity: UUID, chunk: ChunkId) -> str:
    """The object of a chunk. Names sort as IDs do."""
    text = chunk_id_text(chunk)
    return f"{DATASETS}{identity.hex}/chunks/{text[:_PREFIX_CHARS]}/{text}"


def chunk_of_object(name: str) -> ChunkId | None:
    """The ID of a chunk object's name; None where it is not one."""
    parts = name.rsplit("/", 2)
    try:
        chunk = parse_chunk_id(parts[-1])
    except ValueError:
        return None
    return chunk if len(parts) == 3 and parts[1] == parts[2][:_PREFIX_CHARS] else None


def snapshot_prefix(identity: UUID) -> str:
    """What the names of a dataset's snapshots begin with."""
    return f"{DATASETS}{identity.hex}/snapshots/"


def snapshot_object(identity: UUID, version: int) -> str:
    """The object of the snapshot of a version. Names sort as versions do."""
    return f"{snapshot_prefix(identity)}{version:016x}"


def version_of_object(name: str) -> int | None:
    """The version of a snapshot object's name; None where it is not one."""
    text = name.rpartition("/")[2]
    try:
        return int(text, 16) if len(text) == 16 else None
    except ValueError:
        return None


def lease_prefix(identity: UUID) -> str:
    """What the names of a dataset's leases begin with."""
    return f"{DATASETS}{identity.hex}/leases/"


def lease_object(identity: UUID, name: str) -> str:
    """The object of a lease."""
    return f"{lease_prefix(identity)}{name}"


def identity_of_object(name: str) -> UUID | None:
    """The dataset whose identity is the second component of a name; None where it is not one."""
    parts = name.split("/")
    try:
        return UUID(hex=parts[1]) if len(parts) > 1 and len(parts[1]) == 32 else None
    except ValueError:
        return None

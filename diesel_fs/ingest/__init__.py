"""Puts files into a dataset: `put(repository, dataset, source)`.

A put skips entries that the dataset has already, so it can be repeated; nothing is acknowledged
before it is durable. Read `put.py` first (the steps of every put, and the class `Source`), then
`compare.py` (which entries are new, which are in the way), `sources/`, and `packer.py` (entries
become chunks). `worker.py` has the processes that pack a folder, `concurrent_writers.py` mends
conflicts between two writers.
"""

from .manifest import FetchedManifest
from .options import PutOptions, PutReport
from .put import Source, put
from .sources.archive_places import HttpArchive, LocalArchive
from .sources.archives import Archive, ArchivesSource, ArchiveState
from .sources.bucket import Bucket, BucketObject, BucketSource
from .sources.file import FileSource
from .sources.folder import FolderSource
from .sources.manifest_file import fetch_manifest
from .sources.tar import TarSource

__all__ = [
    "Archive",
    "ArchiveState",
    "ArchivesSource",
    "Bucket",
    "BucketObject",
    "BucketSource",
    "FetchedManifest",
    "FileSource",
    "FolderSource",
    "HttpArchive",
    "LocalArchive",
    "PutOptions",
    "PutReport",
    "Source",
    "TarSource",
    "fetch_manifest",
    "put",
]

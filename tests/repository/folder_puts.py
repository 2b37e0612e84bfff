"""Puts of folders, and an object store that fails meanwhile, for tests of repositories."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.ingest import FolderSource, PutOptions, PutReport, put
from diesel_fs.repository.local import LocalRepository

from ..storage.objects.faulty_store import Fault, FaultyStore


def put_folder(
    repository: LocalRepository, source: Path, target: bytes = b"", **options: object
) -> PutReport:
    wanted = {"chunk_bytes": CHUNK_BYTES_MIN, "compress": "none", "jobs": 1, **options}
    return put(repository, "ds", FolderSource(source), target, PutOptions(**wanted))  # type: ignore[arg-type]  # what came is passed on


@contextmanager
def faulty(repository: LocalRepository, *script: Fault) -> Iterator[FaultyStore]:
    """Each of the faults must hit."""
    whole = repository.objects
    with FaultyStore(whole, *script) as store:
        repository.objects = store
        try:
            yield store
        finally:
            repository.objects = whole

"""A put in a process of its own, which a test kills: `put_driver.py URL SOURCE [delete]`.

Prints "acknowledged" only when `put` has returned.
"""

import sys
from pathlib import Path

from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository

if __name__ == "__main__":
    options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=2, delete="delete" in sys.argv)
    with LocalRepository.open(sys.argv[1], create=True) as repository:
        report = put(repository, "ds", FolderSource(Path(sys.argv[2])), options=options)
    assert not report.failed, report.failed
    print("acknowledged", flush=True)

"""The program of a packing process of `dlcmd put`, for object stores that hang in forked children.

`put` runs `python -P -m dlcmd.packing N`; N is the descriptor of a pipe between them.
"""

import sys

from diesel_fs.ingest.worker import run_worker_program
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.storage.objects.store import ObjectStore
from diesel_fs.storage.open_stores import open_objects
from diesel_fs.urls import parse_url

PROGRAM = (sys.executable, "-P", "-m", "dlcmd.packing")  # -P: no imports from `.`


def _opened(url: str) -> ObjectStore:
    return open_objects(parse_url(url), create=False)


if __name__ == "__main__":
    open_buckets_directly()
    run_worker_program(int(sys.argv[1]), _opened)

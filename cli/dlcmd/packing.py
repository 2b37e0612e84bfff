"""A packing process of `dlcmd put`, for object stores that do not work in forked children.

`python -m dlcmd.packing DESCRIPTOR`; its coordinator is at the other end of that pipe.
"""

import sys

from diesel_fs import clouds
from diesel_fs.storage.objects import ObjectStore
from diesel_fs.stores import open_objects
from diesel_fs.urls import parse_url
from diesel_fs.writer.process import run_worker_program

PROGRAM = (sys.executable, "-P", "-m", "dlcmd.packing")


def _opened(url: str) -> ObjectStore:
    return open_objects(parse_url(url), create=False)


if __name__ == "__main__":
    clouds.open_buckets_directly()
    run_worker_program(int(sys.argv[1]), _opened)

"""Putting files into a dataset: walking sources, packing chunks, committing them in order.

`put.py` coordinates one put: it walks (`source.py`) and commits, while forked processes read and
pack (`packer.py`). `tar.py`, `bucket.py`, `ingest/sources/file.py` and the client pack in their own
process with the same `Packer`.
"""

from .options import PutOptions, PutReport
from .put import put_tree
from .sources.bucket import Bucket, BucketObject, put_bucket
from .sources.file import put_file
from .sources.tar import put_tar

__all__ = [
    "Bucket",
    "BucketObject",
    "PutOptions",
    "PutReport",
    "put_bucket",
    "put_file",
    "put_tar",
    "put_tree",
]

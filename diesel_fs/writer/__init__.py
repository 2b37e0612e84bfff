"""Putting files into a dataset: walking sources, packing chunks, committing them in order.

`put.py` coordinates one put: it walks (`source.py`) and commits, while forked processes read and
pack (`pack.py`). `tar.py`, `bucket.py`, `single.py` and the client pack in their own process with
the same `Packer`.
"""

from .bucket import Bucket, BucketObject, put_bucket
from .options import PutOptions, PutReport
from .put import put_tree
from .single import put_file
from .tar import put_tar

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

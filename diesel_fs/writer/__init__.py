"""Putting files into a dataset: walking sources, packing chunks, committing them in order.

`put.py` coordinates one put: it walks (`source.py`) and commits, while forked processes read and
pack (`pack.py`). `tar.py` and the client pack in their own process with the same `Packer`.
"""

from .options import PutOptions, PutReport
from .put import put_tree

__all__ = ["PutOptions", "PutReport", "put_tree"]

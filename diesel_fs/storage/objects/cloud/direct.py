"""Lets a program of DIESEL-FS open buckets in its own process, without a helper process.

Only programs import this module (`tests/test_layers.py` checks it): the library that speaks to
buckets hangs in forked children, and users' training processes fork. The library is imported when
the first bucket is opened, since that takes a tenth of a second.
"""

from ..store import ObjectStore
from .opening import open_buckets_by


def open_buckets_directly() -> None:
    """From now on this process opens bucket URLs itself. Nothing is sent before one is opened."""
    open_buckets_by(_open)


def _open(url: str, create: bool) -> ObjectStore:
    from .store import open_cloud  # noqa: PLC0415  # the module's docstring says why

    return open_cloud(url, create=create)

"""Lets a program of DIESEL-FS open buckets in its own process, without a helper process.

Only programs import this module (`tests/test_layers.py`); `cloud/__init__.py` says why. obstore is
imported when the first bucket is opened, since the import takes a tenth of a second.
"""

from ..store import ObjectStore
from .opening import open_buckets_by


def open_buckets_directly() -> None:
    """To be called before `open_objects`. Sends nothing."""
    open_buckets_by(_open)


def _open(url: str, create: bool) -> ObjectStore:
    from .store import open_cloud  # noqa: PLC0415  # the module's docstring says why

    return open_cloud(url, create=create)

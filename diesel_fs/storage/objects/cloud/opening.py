"""Opens buckets through a helper process (`proxy.py`), or as `direct.py` has set it for our own
programs."""

from collections.abc import Callable

from ..store import ObjectStore
from .proxy import CloudProxy

BucketOpener = Callable[[str, bool], ObjectStore]
"""Opens the object store at a bucket's URL; with True it makes one if there is none."""


def _by_helper(url: str, create: bool) -> ObjectStore:
    return CloudProxy.open(url, create=create)


_opener: BucketOpener = _by_helper


def open_bucket(url: str, *, create: bool) -> ObjectStore:
    """Raises ConfigError, ObjectStoreError, ObjectMissing."""
    return _opener(url, create)


def open_buckets_by(opener: BucketOpener) -> None:
    global _opener  # noqa: PLW0603  # a process has one way
    _opener = opener

"""Opens buckets: through a helper process (`proxy.py`), or in this process if `direct.py` has set
that.
"""

from collections.abc import Callable

from ..store import ObjectStore
from .proxy import CloudProxy

BucketOpener = Callable[[str, bool], ObjectStore]
"""If the second argument is True, it makes a missing store."""


def _by_helper(url: str, create: bool) -> ObjectStore:
    return CloudProxy.open(url, create=create)


_opener: BucketOpener = _by_helper


def open_bucket(url: str, *, create: bool) -> ObjectStore:
    """`create` makes a store if there is none. Raises ConfigError, ObjectStoreError,
    ObjectMissing."""
    return _opener(url, create)


def open_buckets_by(opener: BucketOpener) -> None:
    """Applies to all later calls of `open_bucket` in this process."""
    global _opener  # noqa: PLW0603  # one way to open, for the whole process
    _opener = opener

"""Opens buckets: through a helper process (`proxy.py`), or in this process, if `direct.py` has set
that for a program of DIESEL-FS."""

from collections.abc import Callable

from ..store import ObjectStore
from .proxy import CloudProxy

BucketOpener = Callable[[str, bool], ObjectStore]
"""Opens the object store at a bucket's URL; with True it makes one if there is none."""


def _by_helper(url: str, create: bool) -> ObjectStore:
    return CloudProxy.open(url, create=create)


_opener: BucketOpener = _by_helper


def open_bucket(url: str, *, create: bool) -> ObjectStore:
    """The object store at a bucket's URL; with `create` it is made if there is none. Raises
    ConfigError, ObjectStoreError, ObjectMissing."""
    return _opener(url, create)


def open_buckets_by(opener: BucketOpener) -> None:
    """Let `open_bucket` use `opener` in this process from now on."""
    global _opener  # noqa: PLW0603  # one way to open, for the whole process
    _opener = opener

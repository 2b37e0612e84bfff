"""Repositories in the cloud, for our own programs.

Only programs import this module (`tests/test_layers.py` checks it): the library behind it does not
live in forked children, and users' training processes fork. It is imported when it is needed, since
that takes a tenth of a second.
"""

from ....urls import CLOUD_SCHEMES, RepositoryUrl
from ...open_stores import register_opener
from ..store import ObjectStore


def open_buckets_directly() -> None:
    """This process may open repositories in the cloud. Nothing is sent before one is opened."""
    for scheme in CLOUD_SCHEMES:
        register_opener(scheme, _open)


def _open(url: RepositoryUrl, create: bool) -> ObjectStore:
    from .store import open_cloud  # noqa: PLC0415  # see the module

    return open_cloud(url.objects_url, create=create)

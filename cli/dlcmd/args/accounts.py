"""Opens the accounts of a server, for the verbs `user` and `grant`."""

from diesel_fs.repository.admin import Administration, open_administration
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.urls import parse_url

from .options import global_flags


def open_accounts(*, create: bool = False) -> Administration:
    open_buckets_directly()
    settings = global_flags().settings()
    return open_administration(
        parse_url(settings.repository_url), settings.credentials, create=create
    )

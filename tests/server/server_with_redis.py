"""A fixture: a repository behind server programs, with a real Redis."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from diesel_fs.credentials import Credentials
from diesel_fs.remote.open import open_repository
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account
from tests.storage.metadata.redis_servers import RedisServer

from .program import Server, new_repository


class ServerWithRedis:
    def __init__(self, folder: Path, *users: Account | str, workers: int = 2) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis", {"appendonly": "yes"})
        self.store = folder / "store"
        self.direct_url = f"{self.store.as_uri()}?meta={self.redis.url}"
        self.credentials: Mapping[str, Credentials] = new_repository(self.direct_url, *users)
        self.workers = workers
        self.servers: list[Server] = []
        self.add()

    def add(self, listen: str = "127.0.0.1:0") -> Server:
        """Another server over the same stores. It shares no private copies with its clients."""
        server = Server(
            self.folder / "servers",
            *("--store", self.store.as_uri(), "--meta", self.redis.url),
            listen=listen,
            workers=self.workers,
            environment={"XDG_CACHE_HOME": str(self.folder / "server's cache")},
        )
        self.servers.append(server)
        return server

    @property
    def url(self) -> str:
        return "diesel://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def open(self, name: str = "root") -> RemoteRepository:
        found = open_repository(self.url, self.credentials[name])
        assert isinstance(found, RemoteRepository)
        return found

    def direct(self) -> LocalRepository:
        return LocalRepository.open(self.direct_url)

    def empty(self) -> None:
        with self.open() as repository:
            for info in repository.datasets():
                repository.delete_dataset(info.name)

    def environment(self, name: str = "root") -> dict[str, str]:
        who = self.credentials[name]
        return {"DIESEL_URL": self.url, "DIESEL_USER": who.user, "DIESEL_KEY": who.key_text}

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.redis.close()


@contextmanager
def server_with_redis(
    folder: Path, *users: Account | str, workers: int = 2
) -> Iterator[ServerWithRedis]:
    found = ServerWithRedis(folder, *users, workers=workers)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def as_user(found: ServerWithRedis, name: str = "root") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in found.environment(name).items():
            patch.setenv(key, value)
        yield

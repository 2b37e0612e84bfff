"""Real Redis processes for the registrations of tests' masters, and such masters."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from diesel_fs.peers.members.membership import Member, TaskName
from diesel_fs.peers.members.redis_registry import RedisMemberStore
from diesel_fs.peers.members.registry import RedisRegistry
from tests.storage.metadata.redis_servers import RedisCluster, RedisServer

STORE = UUID(int=99)
TASK = TaskName(UUID(int=7), "ann", "resnet")


def master(rank: int, instance: int = 0, version: int = 1) -> Member:
    number = instance or rank + 1
    return Member(rank, number.to_bytes(16, "big"), f"node{rank}:{9000 + number}", version)


class RedisPlace:
    def __init__(self, servers: list[RedisServer], url: str) -> None:
        self.servers = servers
        self.url = url
        self._opened: list[RedisMemberStore] = []

    def open(self, ttl_s: float = 6.0, deadline_s: float = 2.0) -> RedisMemberStore:
        found = RedisMemberStore.open(self.url, store=STORE, ttl_s=ttl_s, deadline_s=deadline_s)
        self._opened.append(found)
        return found

    def registry(
        self, task: TaskName = TASK, secret: bytes | None = None, ttl_s: float = 6.0
    ) -> RedisRegistry:
        return RedisRegistry(task, secret, lambda: self.open(ttl_s))

    def keys(self) -> list[object]:
        return [key for server in self.servers for key in server.client().keys("dfs:{task.*")]

    def forget_all(self) -> None:
        for server in self.servers:
            server.client().flushall()

    def close(self) -> None:
        for each in self._opened:
            each.close()


@contextmanager
def redis_place(redis: RedisServer | RedisCluster) -> Iterator[RedisPlace]:
    servers = redis.nodes if isinstance(redis, RedisCluster) else [redis]
    found = RedisPlace(servers, redis.url)
    found.forget_all()
    try:
        yield found
    finally:
        found.close()

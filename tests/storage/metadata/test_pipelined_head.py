"""A `PipelinedHeadRead` gives the head that `RedisMetadata.head` gives at that moment, or None."""

import random
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from redis import Redis

from diesel_fs.errors import DieselError
from diesel_fs.storage.metadata.redis.keys import SCHEMA_KEY, DatasetKeys
from diesel_fs.storage.metadata.redis.pipelined_head import (
    MalformedReply,
    PipelinedHeadRead,
    Replies,
    encode_command,
)
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import DatasetHead
from tests.rows import each_row
from tests.storage.metadata.batches import files
from tests.storage.metadata.metadata_stores import IDENTITY, NAME
from tests.storage.metadata.redis_servers import RedisServer, shared_server
from tests.storage.metadata.watched_redis import commit_without_applying

KEYS = DatasetKeys(IDENTITY)
READS_TO_LEARN = 3
"""The first read learns the identity, the second generation and buckets; the third can prove a
head.
"""


@dataclass
class ReadSetup:
    meta: RedisMetadata
    redis: Redis
    connection: socket.socket
    pipelined: PipelinedHeadRead

    def read(self, piece_bytes: int = 1 << 16) -> DatasetHead | None:
        self.connection.sendall(self.pipelined.begin())
        while not self.pipelined.feed(self.connection.recv(piece_bytes)):
            pass
        return self.pipelined.head

    def learn(self) -> DatasetHead:
        for _ in range(READS_TO_LEARN):
            found = self.read()
        assert found is not None
        return found

    def put(self, number: int) -> int:
        return self.meta.commit(IDENTITY, files(number, b"f%d" % number).batch())


@pytest.fixture(params=[1, 5])
def setup(shared: RedisServer, request: pytest.FixtureRequest) -> Iterator[ReadSetup]:
    buckets: int = request.param
    with (
        closing(RedisMetadata.open(shared.url, buckets=buckets)) as meta,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        meta.create(NAME, IDENTITY)
        meta.commit(IDENTITY, files(1, *(b"d%d/f" % i for i in range(20))).batch())
        connection.settimeout(10)
        connection.connect(str(shared.socket))
        yield ReadSetup(meta, shared.client(), connection, PipelinedHeadRead(NAME))


def test_it_learns_its_commands_and_then_sees_every_commit(setup: ReadSetup) -> None:
    assert setup.read() is None
    assert setup.learn() == setup.meta.head(NAME)
    for number in range(2, 8):
        version = setup.put(number)
        found = setup.read()
        assert found == setup.meta.head(NAME)
        assert found is not None
        assert found.version == version
        assert setup.read() == found


def first_bucket(setup: ReadSetup) -> bytes:
    (key,) = setup.redis.keys("dfs:{*.0}:t")
    assert isinstance(key, bytes)
    return key


def rebuild(setup: ReadSetup) -> None:
    setup.meta.rebuild(NAME, IDENTITY, [files(3, b"x").batch()])


def make_anew(setup: ReadSetup) -> None:
    setup.meta.drop(IDENTITY)
    setup.meta.create(NAME, uuid.UUID(int=8))


CHANGES: dict[str, Callable[[ReadSetup], object]] = {
    "no_scripts": lambda setup: setup.redis.script_flush(),
    "pending_plan": lambda setup: commit_without_applying(
        shared_server().url, files(2, b"f2").batch()
    ),
    "plan_of_another_generation": lambda setup: setup.redis.rpush(KEYS.pending, b"z" * 48),
    "lost_bucket": lambda setup: setup.redis.delete(first_bucket(setup)),
    "damaged_bucket": lambda setup: setup.redis.hset(first_bucket(setup), "pieces", "many"),
    "bucket_of_another_type": lambda setup: setup.redis.set(first_bucket(setup), "x"),
    "rebuilt": rebuild,
    "dropped": lambda setup: setup.meta.drop(IDENTITY),
    "made_anew": make_anew,
    "lost_head": lambda setup: setup.redis.delete(KEYS.head),
    "lost_name": lambda setup: setup.redis.hdel("dfs:{head}:names", NAME),
    "another_schema": lambda setup: setup.redis.set(SCHEMA_KEY, "99"),
    "emptied": lambda setup: setup.redis.flushall(),
}
"""Changes after which `RedisMetadata.head` has to repair something, or to raise an error."""


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_proves_the_right_head_or_nothing(setup: ReadSetup, change: str) -> None:
    setup.learn()
    CHANGES[change](setup)
    assert setup.read() is None
    for _ in range(2 * READS_TO_LEARN):
        before = setup.read()
        try:
            true = setup.meta.head(NAME)
        except DieselError:
            assert before is None
        else:
            assert before in (None, true)
    if change in ("no_scripts", "rebuilt", "made_anew"):
        assert setup.read() is not None, "it has not learnt"


@pytest.mark.parametrize("last", [False, True])
def test_a_change_between_two_of_its_commands_proves_nothing(setup: ReadSetup, last: bool) -> None:
    setup.learn()
    request = setup.pipelined.begin()
    cut = request.rindex(b"*3\r\n", 0, -1 if last else request.index(b"pieces"))
    setup.connection.sendall(request[:cut])
    received = setup.connection.recv(1 << 16)
    rebuild(setup)
    setup.connection.sendall(request[cut:])
    while not setup.pipelined.feed(received):
        received = setup.connection.recv(1 << 16)
    assert setup.pipelined.head is None


def test_random_histories_prove_the_right_head_or_nothing(setup: ReadSetup) -> None:
    draw, proved = random.Random(1), 0
    number = 2
    for _ in range(150):
        what = draw.random()
        if what < 0.4:
            setup.put(number)
            number += 1
        elif what < 0.45:
            setup.meta.rebuild(NAME, IDENTITY, [files(n, b"f%d" % n).batch() for n in (1, 2)])
        elif what < 0.5:
            setup.redis.script_flush()
        found = setup.read(draw.choice([1, 7, 50, 1 << 16]))
        assert found in (None, setup.meta.head(NAME))
        proved += found is not None
    assert proved > 50


@each_row(
    "reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01", b"+OK\r\n+OK\r\n", b"*-5\r\n"]
)
def test_malformed_replies_raise(reply: bytes) -> None:
    with pytest.raises(MalformedReply):
        Replies(1).feed(reply)


def test_surplus_replies_raise() -> None:
    pipelined = PipelinedHeadRead(NAME)
    pipelined.begin()
    with pytest.raises(MalformedReply):
        pipelined.feed(b"$-1\r\n$-1\r\n")
    assert pipelined.head is None


def test_commands_may_have_any_bytes() -> None:
    assert encode_command(("A", b"\r\n\0", 12)) == b"*3\r\n$1\r\nA\r\n$3\r\n\r\n\0\r\n$2\r\n12\r\n"

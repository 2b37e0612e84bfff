"""A glance at a marker: it is what the long way finds at that moment, or it proves nothing."""

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
from tests.storage.metadata.batches import files
from tests.storage.metadata.redis_servers import RedisServer, emptied_server

NAME = "flowers"
IDENTITY = uuid.UUID(int=7)
KEYS = DatasetKeys(IDENTITY)
LOOKS_TO_LEARN = 3
"""Identity, then generation and buckets; from the third look on it can prove something."""


@dataclass
class ReadSetup:
    """A glance over a connection of its own, and the long way beside it."""

    meta: RedisMetadata
    redis: Redis
    connection: socket.socket
    glance: PipelinedHeadRead

    def look(self, piece_bytes: int = 1 << 16) -> DatasetHead | None:
        self.connection.sendall(self.glance.begin())
        while not self.glance.feed(self.connection.recv(piece_bytes)):
            pass
        return self.glance.head

    def learn(self) -> DatasetHead:
        """Look until it proves something."""
        for _ in range(LOOKS_TO_LEARN):
            found = self.look()
        assert found is not None
        return found

    def put(self, number: int) -> int:
        return self.meta.commit(IDENTITY, files(number, b"f%d" % number).batch())


@pytest.fixture
def server() -> RedisServer:
    return emptied_server()


@pytest.fixture(params=[1, 5])
def looking(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[ReadSetup]:
    buckets: int = request.param
    with (
        closing(RedisMetadata.open(server.url, buckets=buckets)) as meta,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        meta.create(NAME, IDENTITY)
        meta.commit(IDENTITY, files(1, *(b"d%d/f" % i for i in range(20))).batch())
        connection.settimeout(10)
        connection.connect(str(server.socket))
        yield ReadSetup(meta, server.client(), connection, PipelinedHeadRead(NAME))


def test_it_learns_what_to_ask_and_then_sees_each_commit(looking: ReadSetup) -> None:
    assert looking.look() is None
    assert looking.learn() == looking.meta.head(NAME)
    for number in range(2, 8):
        version = looking.put(number)
        found = looking.look()
        assert found == looking.meta.head(NAME)
        assert found is not None
        assert found.version == version
        assert looking.look() == found


def test_replies_may_come_in_any_pieces(looking: ReadSetup) -> None:
    looking.learn()
    looking.put(2)
    assert looking.look(1) == looking.meta.head(NAME)
    assert looking.look(7) == looking.look(1) == looking.look()


def _restart_scripts(looking: ReadSetup) -> None:
    looking.redis.script_flush()


def _leave_unapplied(looking: ReadSetup) -> None:
    looking.meta._commits._apply = lambda *_: None  # type: ignore[method-assign]  # a fault is put in
    looking.put(2)


def _leave_a_plan_of_nobody(looking: ReadSetup) -> None:
    looking.redis.rpush(KEYS.pending, b"z" * 48)


def _lose_a_bucket(looking: ReadSetup) -> None:
    looking.redis.delete(*looking.redis.keys("dfs:{*.0}:t"))


def _damage_a_bucket(looking: ReadSetup) -> None:
    (key,) = looking.redis.keys("dfs:{*.0}:t")
    looking.redis.hset(key, "pieces", "many")


def _make_a_bucket_something_else(looking: ReadSetup) -> None:
    (key,) = looking.redis.keys("dfs:{*.0}:t")
    looking.redis.set(key, "x")


def _rebuild(looking: ReadSetup) -> None:
    looking.meta.rebuild(NAME, IDENTITY, [files(3, b"x").batch()])


def _drop(looking: ReadSetup) -> None:
    looking.meta.drop(IDENTITY)


def _make_anew(looking: ReadSetup) -> None:
    looking.meta.drop(IDENTITY)
    looking.meta.create(NAME, uuid.UUID(int=8))


def _take_its_head(looking: ReadSetup) -> None:
    looking.redis.delete(KEYS.head)


def _take_its_name(looking: ReadSetup) -> None:
    looking.redis.hdel("dfs:{head}:names", NAME)


def _be_newer(looking: ReadSetup) -> None:
    looking.redis.set(SCHEMA_KEY, "99")


def _forget_all(looking: ReadSetup) -> None:
    looking.redis.flushall()


CHANGES = [
    _restart_scripts, _leave_unapplied, _leave_a_plan_of_nobody, _lose_a_bucket,
    _damage_a_bucket, _make_a_bucket_something_else, _rebuild, _drop, _make_anew, _take_its_head,
    _take_its_name, _be_newer, _forget_all,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_before_proves_nothing(
    looking: ReadSetup, change: Callable[[ReadSetup], None]
) -> None:
    """Each of these is for the long way to mend, or to name."""
    looking.learn()
    change(looking)
    assert looking.look() is None


@pytest.mark.parametrize("change", CHANGES)
def test_it_never_says_anything_else_than_the_long_way(
    looking: ReadSetup, change: Callable[[ReadSetup], None]
) -> None:
    looking.learn()
    change(looking)
    for _ in range(2 * LOOKS_TO_LEARN):
        before = looking.look()
        try:
            true = looking.meta.head(NAME)
        except DieselError:
            assert before is None
        else:
            assert before in (None, true)
    if change in (_restart_scripts, _rebuild, _make_anew):
        assert looking.look() is not None, "it has not learnt"


@pytest.mark.parametrize("last", [False, True])
def test_a_change_between_two_of_its_commands(looking: ReadSetup, last: bool) -> None:
    """The head is of a generation that does not stand any more when the buckets have been asked, or
    even before."""
    looking.learn()
    request = looking.glance.begin()
    cut = request.rindex(b"*3\r\n", 0, -1 if last else request.index(b"pieces"))
    looking.connection.sendall(request[:cut])
    received = looking.connection.recv(1 << 16)
    _rebuild(looking)
    looking.connection.sendall(request[cut:])
    while not looking.glance.feed(received):
        received = looking.connection.recv(1 << 16)
    assert looking.glance.head is None


def test_random_histories(looking: ReadSetup) -> None:
    """Whatever happens in between, a look says what the long way says, or nothing."""
    draw, proved = random.Random(1), 0
    number = 2
    for _ in range(150):
        what = draw.random()
        if what < 0.4:
            looking.put(number)
            number += 1
        elif what < 0.45:
            looking.meta.rebuild(NAME, IDENTITY, [files(n, b"f%d" % n).batch() for n in (1, 2)])
        elif what < 0.5:
            looking.redis.script_flush()
        found = looking.look(draw.choice([1, 50, 1 << 16]))
        assert found in (None, looking.meta.head(NAME))
        proved += found is not None
    assert proved > 50


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01", b"+OK\r\n+OK\r\n", b"*-5\r\n"]
)
def test_what_is_no_reply_ends_it(said: bytes) -> None:
    with pytest.raises(MalformedReply):
        Replies(1).feed(said)


def test_a_connection_of_which_the_second_half_is_another_s() -> None:
    glance = PipelinedHeadRead(NAME)
    glance.begin()
    with pytest.raises(MalformedReply):
        glance.feed(b"$-1\r\n$-1\r\n")
    assert glance.head is None


def test_commands_hold_any_bytes() -> None:
    assert encode_command(("A", b"\r\n\0", 12)) == b"*3\r\n$1\r\nA\r\n$3\r\n\r\n\0\r\n$2\r\n12\r\n"

"""A clock that a test moves: all code in this process reads its time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata

HOUR_S = 3600
DAY_S = 24 * HOUR_S


class MovedClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._real, self._real_ns = time.time, time.time_ns

    def seconds(self) -> float:
        return self._real() + self.ahead_s

    def nanoseconds(self) -> int:
        return self._real_ns() + int(self.ahead_s * 1e9)


@contextmanager
def moved_clock() -> Iterator[MovedClock]:
    """Stores that are opened meanwhile use it, too. Objects have the real time, which would make a
    purge distrust its own clock; here it does not."""
    clock = MovedClock()
    defaults = [
        getattr(store.open, "__func__").__kwdefaults__  # noqa: B009  # mypy knows no such attribute
        for store in (SqliteMetadata, RedisMetadata)
    ]
    with (
        mock.patch("time.time", clock.seconds),
        mock.patch.object(SqliteMetadata, "now_s", clock.seconds),
        mock.patch.object(RedisMetadata, "now_s", clock.seconds),
        mock.patch("diesel_fs.repository.leases.CLOCK_AHEAD_S_MAX", math.inf),
        mock.patch.dict(defaults[0], clock_ns=clock.nanoseconds),
        mock.patch.dict(defaults[1], clock_ns=clock.nanoseconds),
    ):
        yield clock

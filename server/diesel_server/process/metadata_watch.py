"""Notices when Redis has restarted, and repeats the commits that it may have lost.

The chunks of lost commits are durable in the object store. So at its start, and whenever a Redis's
run ID changes, the server compares each dataset's metadata with its chunks and commits missing ones
(`LocalRepository.begin`). One worker of a server does this; several servers may do it at once.
"""

import logging
from collections.abc import Callable, Sequence

import trio

from diesel_fs.errors import DieselError
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.link import RedisLink

log = logging.getLogger("diesel.server")

EVERY_S = 5.0

EVERY_S_MAX = 300.0
"""The pause grows up to this while comparisons fail: each lists all datasets' chunks."""

_DEADLINE_S = 3.0  # for an answer of Redis

Runs = Callable[[], Sequence[str]]
"""Returns the run IDs of the metadata store's servers; Redis makes a new one at each start. Blocks.
Raises DieselError."""


class RedisRuns:
    """For one thread at a time."""

    def __init__(self, url: str) -> None:
        self._address = parse_redis_url(url)
        self._link: RedisLink | None = None

    def __call__(self) -> Sequence[str]:
        if self._link is None:
            self._link = RedisLink.open(self._address, _DEADLINE_S)
        return self._link.with_retries(self._link.run_ids)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


async def watch_metadata(repository: LocalRepository, runs: Runs | None) -> None:
    """Never returns. `runs` is None if the metadata store is not a Redis."""
    one_thread = trio.CapacityLimiter(1)
    compared: Sequence[str] | None = None  # at the last comparison
    succeeded = True
    has_begun = False
    pause_s = EVERY_S
    while True:
        now: Sequence[str] | None = None
        if runs is not None:
            try:
                now = await trio.to_thread.run_sync(
                    runs, limiter=one_thread, abandon_on_cancel=True
                )
            except DieselError:  # Redis is away, which requests report
                now = compared
        if not has_begun or not succeeded or now != compared:
            if succeeded and compared is not None:
                log.warning("Redis has restarted: its metadata are compared with the chunks")
            has_begun = True
            succeeded = await trio.to_thread.run_sync(
                recommit_lost, repository, limiter=one_thread, abandon_on_cancel=True
            )
            compared = now
            pause_s = EVERY_S if succeeded else min(2 * pause_s, EVERY_S_MAX)
        await trio.sleep(pause_s)


def recommit_lost(repository: LocalRepository) -> bool:
    """Commits lost chunks again, and logs the datasets. Blocks. Returns False if a comparison
    failed and must be repeated."""
    try:
        if repository.meta_problem is not None:
            return False
        datasets = repository.datasets()
    except DieselError as error:
        log.error("the datasets cannot be listed: %s", error)
        return False
    done = True
    for info in datasets:
        before = info.head
        try:
            repository.begin(info.name, create=False)
            after = repository.dataset(info.name).head
        except DieselError as error:
            log.error("the metadata of a dataset cannot be compared with its chunks: %s", error)
            done = done and not error.retry
            continue
        if before is None or (after is not None and after.digest != before.digest):
            log.warning(
                "the metadata store had lost commits of %r: they are committed again", info.name
            )
    return done

"""Whether the metadata store still knows what it knew: looked at when a server starts, and when
Redis turns out to be another run, which may have lost what the one before was told last.

Owned here: when to look. Not owned: what is done with what is missing (`LocalRepository.begin`,
which every writer begins with). One worker of a server looks; several servers may do so at once.
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
"""Where a look does not come to an end: each lists the chunks of all datasets."""

_DEADLINE_S = 3.0

Runs = Callable[[], Sequence[str]]
"""Which runs of the metadata store's programs there are. Blocks. Raises DieselError."""


class RedisRuns:
    """The runs of a Redis, of all its masters."""

    def __init__(self, url: str) -> None:
        self._address = parse_redis_url(url)
        self._link: RedisLink | None = None

    def __call__(self) -> Sequence[str]:
        if self._link is None:
            self._link = RedisLink.open(self._address, _DEADLINE_S)
        return self._link.with_retries(self._link.run_ids)

    def close(self) -> None:
        """Let go of the connection."""
        if self._link is not None:
            self._link.close()


async def watch_metadata(repository: LocalRepository, runs: Runs | None) -> None:
    """Look now, and whenever the runs are others, until it is cancelled. `runs` None: a store that
    does not run by itself."""
    own = trio.CapacityLimiter(1)
    seen: Sequence[str] | None = None
    looked = True
    began = False
    pause_s = EVERY_S
    while True:
        now: Sequence[str] | None = None
        if runs is not None:
            try:
                now = await trio.to_thread.run_sync(runs, limiter=own, abandon_on_cancel=True)
            except DieselError:  # it is away; others say so
                now = seen
        if not began or not looked or now != seen:
            if looked and began:
                log.warning("Redis is another run: what it knows is compared with the chunks")
            began = True
            looked = await trio.to_thread.run_sync(
                fold_in_missing, repository, limiter=own, abandon_on_cancel=True
            )
            seen = now
            pause_s = EVERY_S if looked else min(2 * pause_s, EVERY_S_MAX)
        await trio.sleep(pause_s)


def fold_in_missing(repository: LocalRepository) -> bool:
    """Compare what the metadata store knows of each dataset with the chunks that are there, and
    fold in what it has lost; False where that could not be found out. What it finds is logged."""
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
            log.warning("the metadata of %r were behind its chunks: folded in", info.name)
    return done

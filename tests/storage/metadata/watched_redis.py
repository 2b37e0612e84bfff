"""Redis metadata stores; a test can watch, delay or cut off their steps.

A step is a script that runs inside Redis, or a command.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

from redis import Redis

from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.bucket_scripts import APPLY, LoadedScript
from diesel_fs.storage.metadata.redis.head import HeadReader
from diesel_fs.storage.metadata.redis.keys import STATE, Generation
from diesel_fs.storage.metadata.redis.link import RedisCommand, RedisLink, ScriptCommand
from diesel_fs.storage.metadata.redis.replies import packed_dict
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import CommitBatch
from tests.storage.metadata.metadata_stores import IDENTITY
from tests.storage.metadata.redis_servers import execute

Watcher = Callable[[LoadedScript], object]


class WatchedLink(RedisLink):
    """Calls `before` with each script before it is sent, and `after` when its reply has come.

    With `after_command`, commands are sent one by one, each page of a scan has some `page_rows`
    rows, and `after_command` gets each command after its reply.
    """

    before: Watcher = staticmethod(lambda _: None)
    after: Watcher = staticmethod(lambda _: None)
    after_command: Callable[[RedisCommand], object] | None = None
    page_rows = 10

    def run(self, commands: Sequence[RedisCommand]) -> list[object]:
        if self.after_command is None:
            return super().run(commands)
        replies = list[object]()
        for each in commands:
            words = each.words
            if words[0] in ("HSCAN", "SSCAN"):
                words = [*words[:-1], self.page_rows]
            replies += super().run([each._replace(words=words)])
            self.after_command(each)
        return replies

    def run_scripts(self, runs: Iterable[ScriptCommand]) -> list[object]:
        commands = list(runs)
        scripts = {each.script for each in commands}
        for script in scripts:
            self.before(script)
        replies = super().run_scripts(commands)
        for script in scripts:
            self.after(script)
        return replies


def watched_link(url: str, deadline_s: float = 10) -> WatchedLink:
    return WatchedLink.open(parse_redis_url(url), deadline_s)


def at(script: LoadedScript, work: Callable[[], object]) -> Watcher:
    return lambda each: work() if each == script else None


def dies_at(script: LoadedScript) -> Watcher:
    """A watcher that ends the client at one script with KeyboardInterrupt, without any cleaning."""

    def die() -> None:
        raise KeyboardInterrupt

    return at(script, die)


def commit_without_applying(url: str, *batches: CommitBatch) -> None:
    """Commit as a writer that dies before it applies its pieces."""
    link = watched_link(url)
    link.before = dies_at(APPLY)
    with closing(RedisMetadata(link)) as writer, suppress(KeyboardInterrupt):
        writer.commit(IDENTITY, *batches)
        raise AssertionError("it has applied them")


def make_older(client: Redis, key: bytes, seconds: int) -> None:
    for field, packed in packed_dict(execute(client, "HGETALL", key)).items():
        state, since = STATE.unpack_from(packed)
        client.hset(key, field, STATE.pack(state, since - seconds) + packed[STATE.size :])


def live_generation(url: str) -> Generation:
    with closing(watched_link(url)) as link:
        return HeadReader(link).read_head(IDENTITY).generation

"""Commits in Redis that are interrupted at each of their steps, and commits of many processes at
once.
"""

import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from diesel_fs.storage.metadata.redis.keys import DatasetKeys
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.storage.metadata import crashing
from tests.storage.metadata.batches import Chunk, check, stored_entries
from tests.storage.metadata.crashing import start
from tests.storage.metadata.metadata_stores import IDENTITY, NAME
from tests.storage.metadata.redis_proxy import RedisProxy
from tests.storage.metadata.redis_servers import RedisServer

FOLDERS = 7
BUCKETS = 3
BEFORE = [1, 2, 3]


@pytest.fixture
def meta(shared: RedisServer) -> Iterator[RedisMetadata]:
    """A store with the chunks `BEFORE`."""
    with closing(RedisMetadata.open(shared.url, buckets=BUCKETS)) as store:
        store.create(NAME, IDENTITY)
        for number in BEFORE:
            store.commit(IDENTITY, overlapping(number).batch())
        yield store


def opened(url: str) -> RedisMetadata:
    return RedisMetadata.open(url, deadline_s=20)


def overlapping(number: int) -> Chunk:
    """A chunk of `crashing.py` whose entries are in all buckets."""
    return crashing.overlapping(number, FOLDERS)


def committed(meta: RedisMetadata, tried: list[int]) -> list[int]:
    """Which of these chunks are committed; asserts that the state is that of these and no
    others.
    """
    found = {record.id for record in meta.chunks(IDENTITY)}
    done = [number for number in tried if overlapping(number).id in found]
    assert len(done) == len(found)
    check(meta, NAME, [overlapping(number) for number in done])
    return done


STEPS = 12
"""More steps than a commit has, so the last ones do not interrupt anything."""


class FaultAt:
    """A fault of the proxy: it strikes one request, counted from the call of `arm`."""

    def __init__(self, step: int, what: str) -> None:
        self.hit = False
        self._left = 0
        self._step = step
        self._what = what

    def arm(self) -> None:
        """Count from now on."""
        self._left = self._step

    def __call__(self, number: int, request: bytes) -> str:
        self._left -= 1
        if self._left != 0:
            return ""
        self.hit = True
        return self._what


@pytest.mark.parametrize("what", ["lose", "swallow"])
def test_A6_a_commit_survives_a_lost_connection_at_any_step(
    shared: RedisServer, meta: RedisMetadata, what: str
) -> None:
    """The commit is sent again, its files, bytes, chunks and holes count once, and each try removes
    the pieces of the one before.
    """
    tried = list(BEFORE)
    hits = 0
    for step in range(1, STEPS + 1):
        fault = FaultAt(step, what)
        with (
            RedisProxy(shared.socket, fault) as proxy,
            closing(RedisMetadata.open(proxy.url, deadline_s=10)) as other,
        ):
            fault.arm()
            tried.append(len(tried) + 1)
            version = other.commit(IDENTITY, overlapping(tried[-1]).batch())
        hits += fault.hit
        assert version == meta.head(NAME).version
        assert committed(meta, tried) == tried
        client, keys = shared.client(), DatasetKeys(IDENTITY)
        assert not client.llen(keys.pending)
        assert not client.hlen(keys.begun), "a try has left its pieces"
        assert not any(client.hlen(key) for key in client.keys("dfs:*}:x"))
    assert 5 <= hits < STEPS, "a commit has at least five steps, and fewer than were tried"


class KillAt:
    """A fault of the proxy: it kills the process that uses the proxy, before or after a step of its
    commit.
    """

    def __init__(self, step: int, when: str) -> None:
        self._left = step
        self._when = when
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()

    def watch(self, process: "subprocess.Popen[str]") -> None:
        """Set the process that is to be killed."""
        self._process = process
        self._started.set()

    def __call__(self, number: int, request: bytes) -> str:
        self._started.wait(30)
        if b"INFO" in request or b"$3\r\nGET" in request:  # the opening
            return ""
        self._left -= 1
        if self._left != 0:
            return ""
        process = self._process
        assert process is not None
        if self._when == "before":
            process.kill()
            process.wait()
            return "lose"
        process.send_signal(signal.SIGSTOP)  # Redis hears it, and the process no answer
        threading.Timer(0.05, process.kill).start()
        return ""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_A6_A9_a_writer_killed_at_any_step_commits_all_or_nothing(
    shared: RedisServer, meta: RedisMetadata, when: str, at_once: int
) -> None:
    """A crash leaves all of the commit or nothing; the next client completes it."""
    outcomes = set()
    tried = list(BEFORE)
    for step in range(1, STEPS):
        group = list(range(10 * step, 10 * step + at_once))
        before, state = meta.head(NAME), stored_entries(meta.changes(IDENTITY, 0).rows)
        fault = KillAt(step, when)
        with (
            RedisProxy(shared.socket, fault) as proxy,
            start(opened, proxy.url, group, at_once=at_once, folders=FOLDERS) as process,
        ):
            fault.watch(process)
            output, _ = process.communicate(timeout=60)
        is_acked = len(output.splitlines()) == at_once
        with closing(RedisMetadata.open(shared.url)) as fresh:
            is_in = fresh.head(NAME).version > before.version
            assert is_in or not is_acked
            if not is_in:
                assert fresh.head(NAME) == before
                assert stored_entries(fresh.changes(IDENTITY, 0).rows) == state
            known = [*tried, *group] if is_in else tried
            assert committed(fresh, [*tried, *group]) == known
            outcomes.add((is_in, is_acked))
            tried += group
            for number in group:
                fresh.commit(IDENTITY, overlapping(number).batch())
            assert committed(fresh, tried) == tried
        if process.returncode == 0:
            break
    assert process.returncode == 0, "not every step was tried"
    assert outcomes >= {(False, False), (True, False), (True, True)}


def test_L1_L2_commits_of_processes_and_threads_at_once_all_count(
    meta: RedisMetadata, shared: RedisServer
) -> None:
    numbers = list(range(4, 64))
    random.Random(1).shuffle(numbers)
    started = [
        start(opened, shared.url, numbers[i::3] + numbers[:5], at_once=i + 1, folders=FOLDERS)
        for i in range(3)
    ]
    own = list(range(64, 84))
    threads = [
        threading.Thread(
            target=lambda part: [meta.commit(IDENTITY, overlapping(n).batch()) for n in part],
            args=(own[i::2],),
        )
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    versions = []
    while any(process.poll() is None for process in started):
        changes = meta.changes(IDENTITY, 0)
        versions.append(changes.head.version)
        assert len(changes.chunks) == changes.head.chunks
        holding = {changes.rows.chunks[i] for i in set(changes.rows.chunk.tolist())}
        assert holding <= {chunk.id for chunk in changes.chunks}
        sizes = changes.rows.records["size"]
        assert (len(sizes), int(sizes.sum())) == (changes.head.files, changes.head.bytes)
    for thread in threads:
        thread.join()
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert versions == sorted(versions)
    assert len(set(versions)) > 3, "nothing was read while the others wrote: proves nothing"
    assert all(len(output.splitlines()) == 25 for output in outputs)
    tried = [*BEFORE, *numbers, *own]
    assert sorted(committed(meta, tried)) == sorted(tried)

"""Processes that commit to one store: many at once, or ended in the middle of a commit."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.storage.metadata.redis.keys import DatasetKeys
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import MetadataStore
from tests.storage.metadata.batches import Chunk, Entry, check, stored_entries
from tests.storage.metadata.metadata_stores import IDENTITY, NAME
from tests.storage.metadata.redis_proxy import RedisProxy
from tests.storage.metadata.redis_servers import RedisServer
from tests.tiers import fast_first

ENTRIES = 50
FOLDERS = 7
BEFORE = [1, 2, 3]
"""The chunks that a store in Redis has."""


def open_sqlite(path: str) -> SqliteMetadata:
    return SqliteMetadata.open(Path(path), create=True)


def open_redis(url: str) -> RedisMetadata:
    return RedisMetadata.open(url, deadline_s=20, buckets=3)


def overlapping(number: int) -> Chunk:
    """A chunk with paths that others have, in all buckets, and with half of a large file."""
    extent = Entry(
        b"big%d" % (number // 2), 9, number=number % 2, extents=2, first=(number // 2, 0)
    )
    small = tuple(
        Entry(b"%d/%d" % (i % FOLDERS, number * 7 % 10 + i), number + i) for i in range(ENTRIES)
    )
    return Chunk(number, (extent, *small))


def start(
    opener: Callable[[str], MetadataStore],
    where: str,
    numbers: Sequence[int],
    *before: str,
    at_once: int = 1,
) -> "subprocess.Popen[str]":
    """A process that commits `overlapping` chunks with these numbers, `at_once` in each commit, and
    prints number and version of those that are committed. `before` are words before the command."""
    code = f"import sys; from {__name__} import commit_and_print; commit_and_print(*sys.argv[1:])"
    words = [opener.__name__, where, ",".join(map(str, numbers)), str(at_once)]
    command = [*before, sys.executable, "-c", code, *words]
    tree = Path(__file__).resolve().parents[3]
    return subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, text=True)


def commit_and_print(opener: str, where: str, numbers: str, at_once: str) -> None:
    tried = list(map(int, numbers.split(",")))
    with closing(globals()[opener](where)) as meta:
        for begin in range(0, len(tried), int(at_once)):
            group = tried[begin : begin + int(at_once)]
            version = meta.commit(IDENTITY, *(overlapping(number).batch() for number in group))
            print("\n".join(f"{number} {version}" for number in group), flush=True)


def acknowledged(output: str) -> list[tuple[int, int]]:
    """Half a line at the end does not count."""
    lines = [line.split() for line in output.splitlines()]
    return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]


def committed(meta: MetadataStore, tried: list[int]) -> list[int]:
    """Return the committed ones among these chunks; assert that the state is theirs and no
    others'."""
    found = {record.id for record in meta.chunks(IDENTITY)}
    done = [number for number in tried if overlapping(number).id in found]
    assert len(done) == len(found)
    check(meta, NAME, [overlapping(number) for number in done])
    return done


@pytest.mark.parametrize("opener", [open_sqlite, open_redis])
def test_L1_L2_commits_of_processes_and_threads_at_once_all_count(
    tmp_path: Path, shared: RedisServer, opener: Callable[[str], MetadataStore]
) -> None:
    where = shared.url if opener is open_redis else str(tmp_path / "meta.sqlite")
    numbers, own = list(range(1, 61)), list(range(64, 84))
    random.Random(1).shuffle(numbers)
    with closing(opener(where)) as meta, ThreadPoolExecutor(2) as pool:
        meta.create(NAME, IDENTITY)
        started = [
            start(opener, where, numbers[i::3] + numbers[:5], at_once=i + 1) for i in range(3)
        ]
        done = pool.map(lambda n: meta.commit(IDENTITY, overlapping(n).batch()), own)
        versions = []
        while any(process.poll() is None for process in started):
            changes = meta.changes(IDENTITY, 0)
            versions.append(changes.head.version)
            assert len(changes.chunks) == changes.head.chunks
            holding = {changes.rows.chunks[i] for i in set(changes.rows.chunk.tolist())}
            assert holding <= {chunk.id for chunk in changes.chunks}
            sizes = changes.rows.records["size"]
            assert (len(sizes), int(sizes.sum())) == (changes.head.files, changes.head.bytes)
        assert versions == sorted(versions)
        assert len(set(versions)) > 3, "nothing was read while the others wrote: proves nothing"
        last = max(done)
        for process in started:
            answer = acknowledged(process.communicate(timeout=60)[0])
            assert process.returncode == 0
            assert len(answer) == 25
            fresh = [version for _, version in answer[:20]]
            assert fresh == sorted(fresh)
            last = max(last, *fresh)
        assert sorted(committed(meta, [*numbers, *own])) == sorted([*numbers, *own])
        assert meta.head(NAME).version == last


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("when", fast_first([3, 13, 1, 2, 5, 8, 21, 34], 2))
def test_A6_a_kill_at_any_write_loses_no_commit(tmp_path: Path, when: int, at_once: int) -> None:
    path = str(tmp_path / "meta.sqlite")
    with closing(open_sqlite(path)) as meta:
        meta.create(NAME, IDENTITY)
    tried = list(range(1, 7))
    trace = tmp_path / "trace"
    options = ["-f", "-o", str(trace), "-P", f"{path}-wal", "-P", path]
    inject = f"inject=pwrite64:signal=KILL:when={when}"
    try:
        words = ("strace", *options, "-e", "trace=pwrite64", "-e", inject)
        process = start(open_sqlite, path, tried, *words, at_once=at_once)
    except FileNotFoundError:
        pytest.skip("strace is missing")
    output, _ = process.communicate()
    if not trace.exists() or not trace.stat().st_size:
        pytest.skip("strace may not trace here")
    assert "killed by SIGKILL" in trace.read_text(), "the fault was not hit: proves nothing"
    acked = {number for number, _ in acknowledged(output)}
    with closing(open_sqlite(path)) as meta:
        done = committed(meta, tried)
        assert acked <= set(done), "an acknowledged commit is lost"
        assert len(done) <= len(acked) + at_once
        assert len(done) % at_once == 0, "a part of a commit is there"
        for number in tried:
            meta.commit(IDENTITY, overlapping(number).batch())
        assert committed(meta, tried) == tried


@pytest.fixture
def meta(shared: RedisServer) -> Iterator[RedisMetadata]:
    with closing(open_redis(shared.url)) as store:
        store.create(NAME, IDENTITY)
        for number in BEFORE:
            store.commit(IDENTITY, overlapping(number).batch())
        yield store


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
    """A fault of the proxy: it kills the process that uses it, before or after a step."""

    def __init__(self, step: int, when: str) -> None:
        self._left = step
        self._when = when
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()

    def watch(self, process: "subprocess.Popen[str]") -> None:
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
        process.send_signal(signal.SIGSTOP)  # Redis gets the request, and the process no answer
        threading.Timer(0.05, process.kill).start()
        return ""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_A6_A9_a_writer_killed_at_any_step_commits_all_or_nothing(
    shared: RedisServer, meta: RedisMetadata, when: str, at_once: int
) -> None:
    outcomes = set()
    tried = list(BEFORE)
    for step in range(1, STEPS):
        group = list(range(10 * step, 10 * step + at_once))
        before, state = meta.head(NAME), stored_entries(meta.changes(IDENTITY, 0).rows)
        fault = KillAt(step, when)
        with (
            RedisProxy(shared.socket, fault) as proxy,
            start(open_redis, proxy.url, group, at_once=at_once) as process,
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

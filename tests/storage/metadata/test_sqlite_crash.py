"""Real processes that commit to one SQLite store: many at once, and killed in the middle of a
commit.
"""

import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from tests.storage.metadata.batches import Chunk, Entry, check

NAME = "flowers"
IDENTITY = uuid.UUID(int=7)
TREE = Path(__file__).resolve().parents[3]
ENTRIES = 50


def shared(number: int) -> Chunk:
    """A chunk whose paths other chunks have too, and an extent that it shares with another."""
    extent = Entry(
        b"big%d" % (number // 2), 9, number=number % 2, extents=2, first=(number // 2, 0)
    )
    small = tuple(Entry(b"a/%d" % (number * 7 % 10 + i), number) for i in range(ENTRIES))
    return Chunk(number, (extent, *small))


def work(path: str, numbers: str, at_once: str) -> None:
    """What the other processes do: commit these chunks, so many together, and say so then."""
    tried = list(map(int, numbers.split(",")))
    with closing(SqliteMetadata.open(Path(path), create=True)) as meta:
        meta.create(NAME, IDENTITY)
        for begin in range(0, len(tried), int(at_once)):
            group = tried[begin : begin + int(at_once)]
            version = meta.commit(IDENTITY, *(shared(number).batch() for number in group))
            print("\n".join(f"{number} {version}" for number in group), flush=True)


def start(
    path: Path, numbers: list[int], *before: str, at_once: int = 1
) -> "subprocess.Popen[str]":
    code = (
        "import sys; from tests.storage.metadata.test_sqlite_crash import work; work(*sys.argv[1:])"
    )
    words = [str(path), ",".join(map(str, numbers)), str(at_once)]
    command = [*before, sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, text=True)


def acknowledged(output: str) -> list[tuple[int, int]]:
    """Numbers and versions of the commits that a process has reported as done."""
    lines = [line.split() for line in output.splitlines()]
    return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]


def check_whole(path: Path, acked: list[int], tried: list[int], at_once: int = 1) -> None:
    """Assert that every acknowledged chunk is committed, and of chunks that were committed together
    all or none.
    """
    with closing(SqliteMetadata.open(path)) as meta:
        found = [record.id for record in meta.chunks(IDENTITY)]
        done = [number for number in tried if shared(number).id in found]
        assert len(done) == len(found)
        assert set(acked) <= set(done)
        assert len(done) <= len(acked) + at_once
        assert len(done) % at_once == 0
        check(meta, NAME, [shared(number) for number in done])
        for number in tried:
            meta.commit(IDENTITY, shared(number).batch())
        check(meta, NAME, [shared(number) for number in tried])


def test_L1_L2_commits_of_many_processes_at_once_all_count(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    numbers = list(range(1, 61))
    random.Random(1).shuffle(numbers)
    started = [start(path, numbers[i::3] + numbers[:5]) for i in range(3)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    answers = [acknowledged(output) for output in outputs]
    for answer in answers:
        fresh = [version for _, version in answer[:20]]
        assert len(answer) == 25
        assert fresh == sorted(fresh)
    firsts = {number: version for answer in answers for number, version in reversed(answer)}
    with closing(SqliteMetadata.open(path)) as meta:
        check(meta, NAME, [shared(number) for number in numbers])
        assert meta.head(NAME).version == max(firsts.values())


@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_A6_a_process_killed_at_any_time_loses_no_acknowledged_commit(
    tmp_path: Path, seed: int, at_once: int
) -> None:
    path = tmp_path / "meta.sqlite"
    dice = random.Random(seed)
    tried = list(range(1, 401))
    with start(path, tried, at_once=at_once) as process:
        assert process.stdout is not None
        output = "".join(process.stdout.readline() for _ in range(dice.randrange(1, 60)))
        time.sleep(dice.random() * 0.003)  # somewhere inside a commit
        process.kill()
        output += process.stdout.read()
    assert process.returncode == -signal.SIGKILL, "the kill came after the end: proves nothing"
    acked = [number for number, _ in acknowledged(output)]
    assert acked, "nothing was acknowledged: proves nothing"  # A16
    check_whole(path, acked, tried, at_once)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("when", [1, 2, 3, 5, 8, 13, 21, 34])
def test_A6_a_process_killed_at_any_write_loses_no_acknowledged_commit(
    tmp_path: Path, when: int, at_once: int
) -> None:
    path = tmp_path / "meta.sqlite"
    with closing(SqliteMetadata.open(path, create=True)) as meta:
        meta.create(NAME, IDENTITY)
    tried = list(range(1, 7))
    trace = tmp_path / "trace"
    options = ["-f", "-o", str(trace), "-P", f"{path}-wal", "-P", str(path)]
    inject = f"inject=pwrite64:signal=KILL:when={when}"
    try:
        words = ("strace", *options, "-e", "trace=pwrite64", "-e", inject)
        process = start(path, tried, *words, at_once=at_once)
    except FileNotFoundError:
        pytest.skip("strace is missing")
    output, _ = process.communicate()
    if not trace.exists() or not trace.stat().st_size:
        pytest.skip("strace may not trace here")
    assert "killed by SIGKILL" in trace.read_text(), "the fault was not hit: proves nothing"
    acked = [number for number, _ in acknowledged(output)]
    check_whole(path, acked, tried, at_once)

"""Real processes that commit to one SQLite store: many at once, and killed in the middle of a
commit.
"""

import random
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from tests.storage.metadata.batches import check
from tests.storage.metadata.crashing import acknowledged, overlapping, start
from tests.storage.metadata.metadata_stores import IDENTITY, NAME
from tests.tiers import fast_first


def opened(path: str) -> SqliteMetadata:
    meta = SqliteMetadata.open(Path(path), create=True)
    meta.create(NAME, IDENTITY)
    return meta


def check_whole(path: Path, acked: list[int], tried: list[int], at_once: int = 1) -> None:
    """Assert that every acknowledged chunk is committed, and of chunks that were committed together
    all or none.
    """
    with closing(SqliteMetadata.open(path)) as meta:
        found = [record.id for record in meta.chunks(IDENTITY)]
        done = [number for number in tried if overlapping(number).id in found]
        assert len(done) == len(found)
        assert set(acked) <= set(done)
        assert len(done) <= len(acked) + at_once
        assert len(done) % at_once == 0
        check(meta, NAME, [overlapping(number) for number in done])
        for number in tried:
            meta.commit(IDENTITY, overlapping(number).batch())
        check(meta, NAME, [overlapping(number) for number in tried])


def test_L1_L2_commits_of_many_processes_at_once_all_count(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    numbers = list(range(1, 61))
    random.Random(1).shuffle(numbers)
    started = [start(opened, path, numbers[i::3] + numbers[:5]) for i in range(3)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    answers = [acknowledged(output) for output in outputs]
    for answer in answers:
        fresh = [version for _, version in answer[:20]]
        assert len(answer) == 25
        assert fresh == sorted(fresh)
    firsts = {number: version for answer in answers for number, version in reversed(answer)}
    with closing(SqliteMetadata.open(path)) as meta:
        check(meta, NAME, [overlapping(number) for number in numbers])
        assert meta.head(NAME).version == max(firsts.values())


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("when", fast_first([3, 13, 1, 2, 5, 8, 21, 34], 2))
def test_A6_a_kill_at_any_write_loses_no_commit(tmp_path: Path, when: int, at_once: int) -> None:
    path = tmp_path / "meta.sqlite"
    with closing(SqliteMetadata.open(path, create=True)) as meta:
        meta.create(NAME, IDENTITY)
    tried = list(range(1, 7))
    trace = tmp_path / "trace"
    options = ["-f", "-o", str(trace), "-P", f"{path}-wal", "-P", str(path)]
    inject = f"inject=pwrite64:signal=KILL:when={when}"
    try:
        words = ("strace", *options, "-e", "trace=pwrite64", "-e", inject)
        process = start(opened, path, tried, *words, at_once=at_once)
    except FileNotFoundError:
        pytest.skip("strace is missing")
    output, _ = process.communicate()
    if not trace.exists() or not trace.stat().st_size:
        pytest.skip("strace may not trace here")
    assert "killed by SIGKILL" in trace.read_text(), "the fault was not hit: proves nothing"
    check_whole(path, [number for number, _ in acknowledged(output)], tried, at_once)

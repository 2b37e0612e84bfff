"""The rate limit of logs: dropped lines are counted, and a failing store does not fill the log."""

import errno
import logging
from pathlib import Path

import pytest

from diesel_fs.mounts.launcher import log_path
from diesel_fs.system.log_limit import LINES_AT_ONCE, LogRateLimit
from tests.mounts.conftest import mounting, request_for


def line(number: int, place: int = 1) -> logging.LogRecord:
    return logging.LogRecord("n", logging.ERROR, "file.py", place, "cannot %d", (number,), None)


def test_lines_of_a_kind_are_limited_and_dropped_ones_are_counted() -> None:
    now = [100.0]
    limit = LogRateLimit(lambda: now[0])
    written = [n for n in range(1000) if limit.filter(line(n))]
    assert written == list(range(LINES_AT_ONCE))
    assert limit.filter(line(0, place=2)), "another kind"
    now[0] += 1
    counting = line(7)
    assert limit.filter(counting)
    assert counting.getMessage() == f"cannot 7 ({1000 - LINES_AT_ONCE} more like this left out)"
    assert not limit.filter(line(8))
    now[0] += 3600
    plain = line(9)
    assert limit.filter(plain)
    assert plain.getMessage().startswith("cannot 9 (1 more like this")
    assert [limit.filter(line(n)) for n in range(LINES_AT_ONCE)].count(True) == LINES_AT_ONCE - 1


@pytest.mark.fuse
def test_a_store_that_fails_does_not_fill_the_log(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "missing").write_bytes(b"x" * 100)
    with mounting(source, tmp_path / "mount", "kernel") as mounted:
        for _ in range(120):
            with pytest.raises(OSError, match=r".") as raised:
                (mounted.at / "missing").read_bytes()
            assert raised.value.errno == errno.EIO
        written = log_path(request_for(source, mounted.at)).read_text()
    assert 1 <= written.count("cannot read folder/missing") < LINES_AT_ONCE


def test_lines_about_one_file_leave_room_for_those_about_others() -> None:
    now = [0.0]
    limit = LogRateLimit(lambda: now[0])

    def is_written(subject: str) -> bool:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "a line", None, None)
        record.subject = subject
        return limit.filter(record)

    assert [is_written("a") for _ in range(1000)] == [True] + [False] * 999
    assert is_written("b")
    now[0] = 1.0
    assert is_written("a")

"""What becomes of the files of logs that earlier processes have left."""

import os
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest

from diesel_fs.cache.order_logs.layout import LogCut, LogIdentity
from diesel_fs.cache.order_logs.maker import LogMaker


def test_after_an_error_no_log_that_was_left_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file is a lock: its room would never be free again."""
    maker, opened = object.__new__(LogMaker), list[int]()

    def open_file(name: str, *, makes: bool) -> int:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[-1]

    def of_headers(name: str, file: int) -> object:
        if name == "third":
            os.close(file)  # as `_of_headers` does
            raise OSError("the disk fails")
        entries = np.array([0, 1] if name == "first" else [2, 3])
        return SimpleNamespace(layout=SimpleNamespace(entries=entries))

    names = ["first", "second", "third"]
    files = SimpleNamespace(names=lambda: names, open=open_file)
    monkeypatch.setattr(maker, "_files", files, raising=False)
    monkeypatch.setattr(maker, "_set", SimpleNamespace(is_logged=np.zeros(4)), raising=False)
    monkeypatch.setattr(maker, "_of_headers", of_headers)
    with pytest.raises(OSError, match="the disk fails"):
        maker.leftovers(np.array([0, 1], np.uint32), [])
    assert len(opened) == 3
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
    opened.clear()
    names.pop()
    (found,) = maker.leftovers(np.array([0, 1], np.uint32), [])
    assert found.layout.entries.tolist() == [0, 1]
    os.close(opened[0])


def test_an_older_log_whose_file_cannot_be_read_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still in use: its number would soon be that of another file."""
    maker = object.__new__(LogMaker)
    file = os.open(os.devnull, os.O_RDONLY)

    def fail(file: int) -> None:
        raise OSError("the disk fails")

    monkeypatch.setattr(maker, "_check_punching", fail)
    identity, cut = LogIdentity(UUID(int=1), 1, 7), LogCut.__new__(LogCut)
    with pytest.raises(OSError, match="the disk fails"):
        maker._with_headers(1, identity, cut, file, None)
    os.fstat(file)
    os.close(file)

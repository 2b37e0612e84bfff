"""The process that advises the kernel: order, answers, and its end with the worker."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.mounts.prefetch.pages.advice_process import (
    PIECE_PARTS,
    PIECES_MAX,
    AdviceProcess,
    Advise,
    Parts,
    whole_files,
)
from tests.mounts.observed import is_gone
from tests.waiting import wait_until

DROP = os.POSIX_FADV_DONTNEED


def recording(file: Path) -> Callable[[], Advise]:
    """A function for `AdviceProcess` that records the advice, and which files are open."""

    def make() -> Advise:
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[3:]
                      if os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
        file.with_suffix(".open").write_text("\n".join(open_files))
        log = file.open("a")

        def advise(advice: int, parts: Parts) -> None:
            assert advice == DROP
            print(*parts["entry"], file=log, flush=True)

        return advise

    return make


def test_everything_is_dropped_in_order(tmp_path: Path) -> None:
    signs: list[int] = []
    process = AdviceProcess(recording(tmp_path / "log"))
    entries = np.random.default_rng(1).permutation(20 * PIECE_PARTS + 7).astype(np.uint32)
    process.advise(DROP, whole_files(entries[:5000]), lambda: signs.append(1))
    process.advise(DROP, whole_files(entries[5000:]), lambda: signs.append(1))
    process.close()
    words = (tmp_path / "log").read_text().split()
    assert [int(word) for word in words] == entries.tolist()
    assert len(signs) >= 2


def test_no_file_of_the_worker_is_open_in_it(tmp_path: Path) -> None:
    """An open FUSE connection would outlive the mount's processes. Nothing is started before there
    is something to drop."""
    with (tmp_path / "of the worker").open("w"):
        process = AdviceProcess(recording(tmp_path / "log"))
        process.advise(DROP, whole_files(np.empty(0, np.uint32)), lambda: None)
        assert not process.pid
        process.advise(DROP, whole_files(np.arange(3, dtype=np.uint32)), lambda: None)
        process.close()
    assert (tmp_path / "log").read_text() == "0 1 2\n"
    assert "of the worker" not in (tmp_path / "log.open").read_text()


def test_it_ends_with_its_worker(tmp_path: Path) -> None:
    """Also when the worker is killed."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        process = AdviceProcess(recording(tmp_path / "log"))
        process.advise(DROP, whole_files(np.arange(3, dtype=np.uint32)), lambda: None)
        os.write(sender, b"%d\n" % process.pid)
        time.sleep(60)
        os._exit(0)
    dropping = int(os.read(receiver, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: is_gone(dropping))
    os.close(receiver)
    os.close(sender)


def test_a_killed_process_is_no_error(tmp_path: Path) -> None:
    """The kernel frees the pages that were not dropped when it needs the memory."""
    process = AdviceProcess(recording(tmp_path / "log"))
    process.advise(DROP, whole_files(np.arange(3, dtype=np.uint32)), lambda: None)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    for _ in range(2 * PIECES_MAX):
        process.advise(DROP, whole_files(np.arange(PIECE_PARTS, dtype=np.uint32)), lambda: None)
    assert process.pid not in (0, first)
    wait_until(lambda: is_gone(first))
    process.close()


def test_a_failing_process_is_logged_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(open(2, "w", closefd=False))  # noqa: SIM115  # it stays open
    monkeypatch.setattr(logging.getLogger("diesel.mount"), "handlers", [handler])
    made = tmp_path / "made"
    made.write_text("")

    def make() -> Advise:
        made.write_text(made.read_text() + "x")

        def advise(advice: int, parts: Parts) -> None:
            if made.read_text() == "x":
                raise OSError("no folder")
            with (tmp_path / "log").open("a") as log:
                print(*parts["entry"], file=log)

        return advise

    process = AdviceProcess(make)
    for number in range(4 * PIECES_MAX):
        process.advise(DROP, whole_files(np.array([number], np.uint32)), lambda: None)
        time.sleep(0.01)
    process.close()
    assert made.read_text() == "xx"
    dropped = [int(word) for word in (tmp_path / "log").read_text().split()]
    assert dropped[-1] == 4 * PIECES_MAX - 1
    assert len(dropped) >= 2 * PIECES_MAX
    text = capfd.readouterr().err
    assert "no folder" in text
    assert "starting another" in text


def test_a_hanging_process_is_killed(tmp_path: Path) -> None:
    process = AdviceProcess(lambda: lambda advice, parts: time.sleep(60))
    process.advise(DROP, whole_files(np.arange(3, dtype=np.uint32)), lambda: None)
    pid, start_s = process.pid, time.monotonic()
    process.close()
    assert time.monotonic() - start_s < 5
    os.waitpid(pid, 0)

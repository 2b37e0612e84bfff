"""Signals and lost readers while a put of a folder has packing processes (A15 in FAULTS.md).

The put is stopped (SIGSTOP) in its middle, so the event that ends it always comes then.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository
from tests.processes import children, is_running
from tests.trees import Facts, facts, write

from ..datasets import dataset_state
from ..waiting import wait_until
from .conftest import Dlcmd, program_environment

DEADLINE_S = 30.0
CHUNKS_SEEN = 20  # of 64 KiB; the source has some 70
FILES = 453
OPTIONS = ("--jobs", "2", "--chunk-size", "64K")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    small = {f"d{i % 10}/{i}": os.urandom(9000) for i in range(FILES - 3)}
    return write(tmp_path / "source", small | {f"large{i}": os.urandom(200_000) for i in range(3)})


@dataclass(slots=True)
class Put:
    process: "subprocess.Popen[bytes]"
    packers: list[int]

    def send(self, number: int, *, group: bool) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGCONT)
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err.decode()

    def left(self) -> list[int]:
        with suppress(AssertionError):
            wait_until(lambda: not any(map(is_running, self.packers)), DEADLINE_S / 3)
        return list(filter(is_running, self.packers))


def _has_committed(dlcmd: Dlcmd) -> bool:
    """Whether the dataset has files already: chunks are committed in batches, some time after they
    arrive."""
    with LocalRepository.open(dlcmd.store.as_uri()) as repository:
        head = repository.dataset("ds").head
    return head is not None and head.version > 0


@contextmanager
def stopped_put(
    dlcmd: Dlcmd, source: Path, *options: str, stdout: int = subprocess.DEVNULL
) -> Iterator[Put]:
    with subprocess.Popen(
        [sys.executable, "-m", "dlcmd", "put", *OPTIONS, *options, str(source), "ds"],
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
        env=program_environment(), start_new_session=True,
    ) as process:  # fmt: skip
        try:

            def has_committed_some() -> bool:
                assert process.poll() is None, (
                    "A16: the put has ended already, so the test proves nothing"
                )
                chunks = [*dlcmd.store.glob("datasets/*/chunks/*/*")]
                return len(chunks) >= CHUNKS_SEEN and _has_committed(dlcmd)

            wait_until(has_committed_some)
            process.send_signal(signal.SIGSTOP)
            packers = children(process.pid)
            assert len(packers) == 2, "A16: it has no packing processes, so the test proves nothing"
            yield Put(process, packers)
        finally:
            process.kill()


def check_whole(dlcmd: Dlcmd, there: Facts) -> int:
    dlcmd("verify", "ds")
    with LocalRepository.open(dlcmd.store.as_uri()) as repository:
        showing = dataset_state(repository)
        for path, fact in showing.items():
            assert there[path] == fact or there[path][0] == fact[0] == "folder"
        repository.recover("ds")
        assert dataset_state(repository).items() >= showing.items()
    return sum(fact[0] == "file" for fact in showing.values())


def put_again(dlcmd: Dlcmd, source: Path, tmp_path: Path) -> int:
    """Put the folder again, and check that all files are there. Returns how many were put now."""
    put = dlcmd("put", "--json", *OPTIONS, source, "ds").objects[-1]["files"]
    dlcmd("get", "ds", tmp_path / "back")
    assert facts(tmp_path / "back") == facts(source)
    dlcmd("verify", "ds")
    assert isinstance(put, int)
    return put


@pytest.mark.parametrize(
    ("number", "group", "code", "words"),
    [
        (signal.SIGTERM, False, 143, "ended by SIGTERM"),
        (signal.SIGTERM, True, 143, "ended by SIGTERM"),
        (signal.SIGHUP, False, 129, "ended by SIGHUP"),
        (signal.SIGHUP, True, 129, "ended by SIGHUP"),
        (signal.SIGINT, True, 130, "interrupted"),
    ],
)
def test_A15_a_signal_in_the_middle_of_a_folder(
    dlcmd: Dlcmd, source: Path, tmp_path: Path, number: int, group: bool, code: int, words: str
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this process ignores the signal (nohup), and so do its children")
    with stopped_put(dlcmd, source) as put:
        put.send(number, group=group)
        if group and number != signal.SIGINT:  # only the coordinator handles it
            assert put.left() == []
        ended, result = put.end()
        assert ended == code
        assert put.left() == []
    shows = check_whole(dlcmd, facts(source))
    done = r"(\d+) files? \([0-9.]+ [kM]B\) committed so far"
    form = rf"dlcmd: {words}; {done}; run it again to finish\n"
    committed = re.fullmatch(form, result)
    assert committed is not None, result
    assert int(committed[1]) == shows
    assert 0 < shows < FILES, "A16: nothing or all was committed, so the test proves nothing"
    assert 0 < put_again(dlcmd, source, tmp_path) <= FILES - shows


def test_A15_a_put_under_nohup_ignores_SIGHUP(dlcmd: Dlcmd, source: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_put(dlcmd, source) as put:
            put.send(signal.SIGHUP, group=True)
            assert put.end() == (0, "")
            assert put.left() == []
    finally:
        signal.signal(signal.SIGHUP, before)
    assert check_whole(dlcmd, facts(source)) == FILES
    assert put_again(dlcmd, source, tmp_path) == 0


def test_A15_a_killed_packer_ends_the_put(dlcmd: Dlcmd, source: Path, tmp_path: Path) -> None:
    """The kernel kills it when memory runs out."""
    with stopped_put(dlcmd, source) as put:
        os.kill(put.packers[0], signal.SIGKILL)
        code, err = put.end()
        assert (code, len(err.splitlines())) == (1, 1)
        assert "a packing process died" in err
        assert put.left() == []
    shows = check_whole(dlcmd, facts(source))
    assert 0 < put_again(dlcmd, source, tmp_path) <= FILES - shows


@pytest.mark.parametrize(("options", "errors_too"), [((), False), (("--json",), True)])
def test_A15_EPIPE_in_the_middle_of_a_folder(
    dlcmd: Dlcmd, source: Path, tmp_path: Path, options: tuple[str, ...], errors_too: bool
) -> None:
    """The reader of the progress has ended. If errors cannot be printed either, only the exit code
    shows them."""
    if errors_too:
        os.mkfifo(source / "pipe")  # it will be named, although no process reads that
    receiver, sender = os.pipe()
    try:
        with stopped_put(dlcmd, source, *options, stdout=sender) as put:
            os.close(receiver)
            if errors_too:
                assert put.process.stderr is not None
                put.process.stderr.close()
                put.process.send_signal(signal.SIGCONT)
                assert put.process.wait(DEADLINE_S) == 3
            else:
                assert put.end() == (0, "")
            assert put.left() == []
    finally:
        os.close(sender)
    (source / "pipe").unlink(missing_ok=True)
    assert check_whole(dlcmd, facts(source)) == FILES
    assert put_again(dlcmd, source, tmp_path) == 0

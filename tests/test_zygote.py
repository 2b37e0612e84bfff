"""A program that the zygote forks behaves as one that is started by `exec`."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diesel_fs.system.daemons import DETACH
from tests import zygote

REPORT = Path(__file__).with_name("zygote_report.py")

ENDS = {
    "nothing": "pass",
    "code": "import sys; sys.exit(7)",
    "large code": "import sys; sys.exit(300)",
    "no code": "import sys; sys.exit()",
    "sentence": "import sys; sys.exit('a reason')",
    "error": "print('before'); raise ValueError('why')",
    "syntax": "this is no Python",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "aborted": "import os; os.abort()",
    "at once": "import os; print('lost'); os._exit(4)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "thread": "import threading; threading.Timer(0.5, print, ['later']).start(); print('main')",
    "unflushed": "import sys; sys.stdout.write('no newline')",
    "stream closed": "import sys; sys.stdout.close()",
}


def both_ways(command: list[str], **options: object) -> list[tuple[int, bytes, bytes]]:
    results = []
    for way in (zygote.by_exec, zygote.only_by_fork):
        with way():
            done = subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload]  # options by name
        results.append((done.returncode, done.stdout, done.stderr))
    return results


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_a_forked_program_finds_the_state_of_a_new_one(way: str, tmp_path: Path) -> None:
    code = ["-c", REPORT.read_text()]
    words = {"-c": code, "-m": ["-m", "tests.zygote_report"], "script": [str(REPORT)]}[way]
    passed = os.pipe()
    environment = {
        **os.environ,
        "ODD": "\udcff=\n'",
        "TZ": "Asia/Tokyo",
        "PYTHONPATH": ":".join(zygote.PATH),
    }
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    umask = os.umask(0o027)
    try:
        by_exec, by_fork = both_ways(
            [sys.executable, *words, "an argument", "", "ü"],
            cwd=tmp_path, env=environment, pass_fds=passed, input=b"said", start_new_session=True,
        )  # fmt: skip
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before)
        for each in passed:
            os.close(each)
    assert by_exec[0] == 0, by_exec
    assert json.loads(by_fork[1]) == json.loads(by_exec[1])
    assert by_fork == by_exec


def test_a_forked_program_ends_as_a_new_one_ends() -> None:
    wrong = {}
    for name, code in ENDS.items():
        by_exec, by_fork = both_ways([sys.executable, "-c", code])
        last = [result[2].splitlines()[-1:] for result in (by_exec, by_fork)]
        if by_exec[:2] != by_fork[:2] or (last[0] != last[1] and name != "aborted"):
            wrong[name] = by_exec, by_fork
    assert not wrong


def test_a_closed_output_ends_a_forked_program_as_a_new_one() -> None:
    codes = []
    for way in (zygote.by_exec, zygote.only_by_fork):
        reader, writer = os.pipe()
        os.close(reader)
        with way():
            command = [sys.executable, "-c", "print('x')"]
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        codes.append((done.returncode, b"BrokenPipeError" in done.stderr))
    assert codes[0] == codes[1]
    assert codes[0][1]


def test_a_folder_that_is_missing_is_an_error_of_the_caller(tmp_path: Path) -> None:
    for way in (zygote.by_exec, zygote.only_by_fork):
        with way(), pytest.raises(FileNotFoundError) as caught:
            subprocess.run([sys.executable, "-c", "pass"], cwd=tmp_path / "none", check=False)
        assert caught.value.filename == tmp_path / "none"


def test_many_threads_start_programs_at_once() -> None:
    ended: list[int] = []

    def start(number: int) -> None:
        command = [sys.executable, "-c", f"import sys; sys.exit({number})"]
        ended.append(subprocess.run(command, check=False).returncode)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(20)]
    with zygote.only_by_fork():
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert sorted(ended) == list(range(20))


def test_descriptors_of_any_numbers_stay_open() -> None:
    """The zygote itself uses some of these numbers."""
    command = [sys.executable, "-c", "input()"]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in "abc"]
    file = os.open(os.devnull, os.O_RDONLY)
    passed = [number for number in range(3, 60) if _is_free(number)]
    try:
        for number in passed:
            os.dup2(file, number)
        code = f"import gc, os; gc.collect(); print(*[os.fstat(n).st_rdev for n in {passed}])"
        with zygote.only_by_fork():
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, check=True, pass_fds=passed, stdout=subprocess.PIPE)
    finally:
        for each in others:
            each.communicate(b"\n")
        for number in (file, *passed):
            os.close(number)
    assert len(done.stdout.split()) == len(passed)
    assert len(passed) > 10


def _is_free(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def test_signals_and_waits_reach_a_forked_program() -> None:
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_commands_that_a_zygote_cannot_run_are_started_by_exec() -> None:
    words = {
        "a shell": ["sh", "-c", "true"],
        "another interpreter": ["python3", "-c", "pass"],
        "an option": [sys.executable, "-I", "-c", "pass"],
        "somebody else's module": [sys.executable, "-m", "pip"],
        "no program": [sys.executable],
    }
    for name, command in words.items():
        assert zygote.Command.parse(command) is None, name
    parse = zygote.Command.parse
    detached = parse([sys.executable, *DETACH, sys.executable, "-P", "-m", "dlcmd", "ls"])
    assert detached is not None
    assert (detached.is_detached, detached.is_safe, detached.what) == (True, True, "dlcmd")
    code = [sys.executable, "-c", "import os; print(os.environ.get('PYTHONHASHSEED'))"]
    with zygote.only_by_fork(), pytest.raises(AssertionError):
        subprocess.run(code, env={**os.environ, "PYTHONHASHSEED": "1"}, check=False)

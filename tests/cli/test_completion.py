"""The reaction of real shells, each at a terminal of its own, to a TAB after `dlcmd`."""

import os
import pty
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dlcmd.args.completing import completions
from dlcmd.main import program
from dlcmd.verbs.completion import SCRIPTS
from tests.rows import each_row
from tests.trees import write
from tests.waiting import wait_until

from .conftest import Dlcmd, program_environment

SHELLS = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(dlcmd completion bash)"',
    "zsh": "mkdir f; dlcmd completion zsh >f/_dlcmd; fpath=($PWD/f $fpath);"
    " autoload -U compinit; compinit -D -u",
    "fish": "dlcmd completion fish | source",
}
"""How a user, or a package, gives the code to each shell."""

CONTROL_A, CONTROL_E, TAB = "\x01", "\x05", "\t"


def _words(shell: str, lines: list[str], folder: Path) -> list[list[str]]:
    """Return the words into which the shell splits each of these lines, after a TAB at its end."""
    main, end = pty.openpty()
    environment = program_environment() | {"TERM": "dumb", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    programs = folder / "programs"
    programs.mkdir()
    start = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dlcmd "$@"\n'
    (programs / "dlcmd").write_text(start, encoding="utf-8")
    (programs / "dlcmd").chmod(0o755)
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    files = [folder / f"words{number}" for number in range(len(lines))]
    screen = bytearray()
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *SHELLS[shell]],
        stdin=end, stdout=end, stderr=end, env=environment, cwd=folder,
    ) as process:  # fmt: skip
        os.close(end)
        reader = threading.Thread(target=_read, args=(main, screen))
        reader.start()
        try:
            os.write(main, f"{LOAD[shell]}\r".encode())
            for line, file in zip(lines, files, strict=True):
                # A file under its final name is complete: the last command renames it
                keys = f"{line}{TAB}{CONTROL_A}printf '%s\\n' {CONTROL_E} >{file}.new"
                os.write(main, f"{keys}; mv {file}.new {file}\r".encode())
                wait_until(file.exists, 20, screen.decode)
            os.write(main, b"exit\r")
            process.wait(timeout=20)
        finally:
            process.kill()  # setsid; the shell ends with its terminal
            os.close(main)
    reader.join()
    return [each.read_text(encoding="utf-8").splitlines() for each in files]


def _read(terminal: int, screen: bytearray) -> None:
    with suppress(OSError):  # the shell has ended
        while text := os.read(terminal, 1 << 16):
            screen += text


@pytest.fixture
def pets(dlcmd: Dlcmd, tmp_path: Path) -> str:
    files = {"train/cat/1.jpg": b"a", "it's $x/deep er/file": b"b", "README": b"c"}
    source = write(tmp_path / "source", files)
    dlcmd("put", source, "pets")
    older = str(dlcmd("--json", "ls").objects[0]["version"])
    write(tmp_path / "source", {"new": b"n"})
    dlcmd("put", source, "pets")
    return older


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_verbs_and_addresses(shell: str, pets: str, tmp_path: Path) -> None:
    (tmp_path / "local file").touch()
    expected = {
        "dlcmd mou": ["dlcmd", "mount"],
        "dlcmd mount --policy=ones": ["dlcmd", "mount", "--policy=oneshot"],
        "dlcmd ls pe": ["dlcmd", "ls", "pets/"],
        "dlcmd cat pets/RE": ["dlcmd", "cat", "pets/README"],
        "dlcmd cat pets/it": ["dlcmd", "cat", "pets/it's $x/"],
        f"dlcmd mount pets@{pets[:-1]}": ["dlcmd", "mount", f"pets@{pets}"],
        f"dlcmd ls pets@{pets}/ne": ["dlcmd", "ls", f"pets@{pets}/ne"],  # it has no `new`
        "dlcmd --key-file lo": ["dlcmd", "--key-file", "local file"],
    }
    found = _words(shell, list(expected), tmp_path)
    assert dict(zip(expected, found, strict=True)) == expected


def test_completions_depend_on_the_place(pets: str, dlcmd: Dlcmd) -> None:
    def found(line: str) -> list[tuple[str, str]]:
        return [(each.type, each.value) for each in completions(program, line)]

    for line, expected in {
        "mount ": [("plain", "pets")],
        "grant pets ": [],
        "mount pets ": [("dir", "")],
        "put ": [("part", "pets/"), ("file", "")],
        "ls pets/train/": [("part", "pets/train/cat/")],
        "ls 'pets/it'\"'\"'s $x/": [("part", "pets/it's $x/deep er/")],
        "rm pets@": [],
        f"ls --url {dlcmd.store.as_uri()} pe": [("part", "pets/")],
    }.items():
        assert found(f"dlcmd {line}") == expected
    assert ("part", "pets/") in found("dlcmd ls ")
    assert ("plain", "--task-key-file") in found("dlcmd mount --task")
    [_, (_, older)] = found("dlcmd ls pets@")
    assert older == f"pets@{pets}/"


def test_in_a_large_folder_only_the_common_beginning_is_completed(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlcmd.args.completing.WORDS_MAX", 3)
    names = ["all-1", "all-2", "all-30", "all-31", "other"]
    dlcmd("put", write(tmp_path / "source", dict.fromkeys(names, b"")), "pets")
    assert [each.value for each in completions(program, "dlcmd cat pets/a")] == ["pets/all-"]
    assert len(completions(program, "dlcmd cat pets/all-3")) == 2


@each_row("url", ["diesel://192.0.2.1:9300", "file:///nowhere", "bad"])
def test_a_repository_that_cannot_be_read_completes_nothing(url: str, tmp_path: Path) -> None:
    """A TAB must not hang."""
    request = {"_DLCMD_COMPLETE": "zsh", "_DLCMD_LINE": "dlcmd ls pe", "DIESEL_URL": url}
    key = {"DIESEL_USER": "me", "DIESEL_KEY": "A" * 43}
    done = subprocess.run(
        [sys.executable, "-m", "dlcmd"], check=True, capture_output=True, timeout=60,
        env=program_environment() | request | key, cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"", b"")


def test_the_code_for_each_shell_is_printed_and_no_other(dlcmd: Dlcmd) -> None:
    for shell, code in SCRIPTS.items():
        assert dlcmd("completion", shell).out.decode() == code
    dlcmd("completion", "tcsh", code=2)

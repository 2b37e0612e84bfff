"""Errors that disks return at unusual moments, and killed processes; strace injects the errors."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from diesel_fs.system.atomic_file import remove_leftovers, temporary_name
from tests.processes import children, is_running
from tests.rows import each_row
from tests.trees import facts, write

from ..waiting import wait_until
from .conftest import Dlcmd, program_environment

DEADLINE_S = 60.0
CLOSE = "close:error=EIO"


@contextmanager
def traced(
    *words: str | Path, inject: str, path: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """`dlcmd` under strace; both are killed at the end of the test."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={inject}"]
    command += [] if path is None else ["-P", str(path)]
    environment = program_environment()
    words = (*command, sys.executable, "-m", "dlcmd", *words)
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment) as process:
        yield process
        process.kill()


def ended(*words: str | Path, inject: str, path: Path) -> tuple[int, str]:
    with traced(*words, inject=inject, path=path) as process:
        _, result = process.communicate(timeout=DEADLINE_S)
        return process.returncode, result.decode()


@pytest.fixture
def source(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"22"})
    dlcmd("put", source, "pets")
    return source


@each_row(
    ("verb", "what"),
    [
        ("ls", "datasets/*/DATASET"),
        ("cat", "datasets/*/chunks/*/*"),
        ("get", "datasets/*/chunks/*/*"),
    ],
)
def test_an_error_of_close_in_the_store_names_the_object(
    dlcmd: Dlcmd, source: Path, tmp_path: Path, verb: str, what: str
) -> None:
    assert source.exists()
    (path,) = dlcmd.store.glob(what)
    words = {"ls": ["pets"], "cat": ["pets/a"], "get": ["pets", str(tmp_path / "out")]}[verb]
    name = path.relative_to(dlcmd.store)
    result = f"dlcmd: {name}: cannot read: Input/output error (EIO)\n"
    assert ended(verb, *words, inject=CLOSE, path=path) == (13, result)


def test_errors_of_close_are_reported_for_files_and_ignored_for_folders(
    dlcmd: Dlcmd, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for folder in (source, source / "sub"):
        assert ended("put", source, "more", inject=CLOSE, path=folder) == (0, "")
        (out / "sub").mkdir(parents=True, exist_ok=True)
        into = out / folder.relative_to(source)
        assert ended("get", "--force", "more", out, inject=CLOSE, path=into) == (0, "")
        put, got = facts(source), facts(out)
        del put[b"."], got[b"."]  # the folder itself was there before
        assert got == put
    code, result = ended("put", source, "other", inject=CLOSE, path=source / "sub/b")
    assert (code, result.splitlines()[0]) == (3, "dlcmd: sub/b: Input/output error")


def test_a_metadata_store_that_cannot_be_opened_is_named(dlcmd: Dlcmd, source: Path) -> None:
    file = dlcmd.store / "meta.sqlite"
    code, result = ended("rm", "pets/a", inject="openat:error=EIO:when=1", path=file)
    assert code == 14
    assert f"{file} could not be opened for writing, though its mode allows it" in result
    assert dlcmd("ls", "pets").out == b"a\nsub\n"


def test_a_packing_process_ends_its_chunk_after_its_put(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {str(i): os.urandom(9000) for i in range(40)})
    dlcmd("put", write(tmp_path / "first", {}), "pets")
    options = ("--jobs", "1", "--chunk-size", "64K")
    slowly = "fsync:delay_enter=1000000"
    with traced("put", *options, source, "pets", inject=slowly) as process:
        wait_until(lambda: any(dlcmd.store.rglob("chunks/*/.tmp-*")))
        (coordinator,) = children(process.pid)
        (packer,) = children(coordinator)
        os.kill(coordinator, signal.SIGKILL)
        wait_until(lambda: not is_running(packer))
    assert [*dlcmd.store.rglob(".tmp-*")] == []
    assert len([*dlcmd.store.glob("datasets/*/chunks/*/*")]) == 2  # and the chunk before
    dlcmd("put", source, "pets")
    dlcmd("verify", "pets")


@pytest.mark.parametrize("words", ["pets out", "pets/sub/b out", "--tar out/x pets"])
def test_the_next_get_tidies_up(dlcmd: Dlcmd, source: Path, tmp_path: Path, words: str) -> None:
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    dlcmd("ls", "pets")  # to keep the snapshot: the get renames only files that it writes
    killed = "/^rename(at2?)?$:signal=KILL:when=1"
    with chdir(tmp_path), traced("get", *words.split(), inject=killed) as process:
        assert process.wait(DEADLINE_S) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    (left,) = out.rglob(".dlcmd-*")
    ours, strangers = left.with_name(temporary_name()), left.with_name(of_a_stranger())
    for kept in (ours, strangers):
        kept.write_bytes(b"somebody is writing this")
    with chdir(tmp_path):
        dlcmd("get", *words.split())
    assert {*out.rglob(".dlcmd-*")} == {ours, strangers}


def of_a_stranger() -> str:
    return re.sub("dlcmd-.{8}", "dlcmd-00000000", temporary_name())


def test_strangers_files_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for left in (of_a_stranger(), ".dlcmd-0123456789abcdef", ".dlcmd-mine"):
        (tmp_path / left).touch()
    remove_leftovers(tmp_path)
    assert len([*tmp_path.iterdir()]) == 3
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 86_500)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".dlcmd-mine"]

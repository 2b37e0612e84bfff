"""Runs `dlcmd` as a user does, on a repository of the test's own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlcmd.main import run
from tests.storage.metadata.redis_servers import RedisServer


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    out: bytes
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


def program_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Dlcmd:
    """Runs `dlcmd` on one repository: in this process (`()`), or as a program (`program`)."""

    def __init__(self, store: Path, capture: pytest.CaptureFixture[bytes]) -> None:
        self.store = store
        self._capture = capture

    def __call__(self, *arguments: str | Path, code: int = 0) -> CommandResult:
        self._capture.readouterr()
        ended = run([str(each) for each in arguments])
        captured = self._capture.readouterr()
        result = CommandResult(ended, captured.out, captured.err.decode())
        assert ended == code, (arguments, result)
        assert "Traceback" not in result.err
        return result

    def start(
        self, *words: str | Path, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.PIPE
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "dlcmd", *words],
            stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, env=program_environment(),
        )  # fmt: skip

    def program(
        self, *arguments: str | Path, stdin: bytes | None = None, code: int = 0
    ) -> CommandResult:
        with self.start(*arguments, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(stdin or b"", timeout=60)
        result = CommandResult(process.returncode, out, err.decode())
        assert result.code == code, (arguments, result)
        return result

    def fifo(self, *arguments: str | Path) -> bytes:
        fifo = self.store.parent / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self(*arguments, fifo)
            assert fifo.is_fifo()
            return os.read(reader, 1 << 16)
        finally:
            os.close(reader)
            fifo.unlink()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def dlcmd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Dlcmd:
    store = tmp_path / "store"
    monkeypatch.setenv("DIESEL_URL", store.as_uri())
    return Dlcmd(store, capfdbinary)

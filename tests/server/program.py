"""`diesel-server` as an operator runs it: a program of its own, which ends with the tests."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from diesel_fs.credentials import Credentials
from diesel_fs.net import keys
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account
from diesel_fs.storage.open_stores import open_accounts
from tests.processes import children, is_running, resident_bytes
from tests.waiting import until

START_S = 60.0
READY = re.compile(r"accepts connections at (\S+)")


def new_repository(url: str, *users: Account | str) -> dict[str, Credentials]:
    """Make a repository with accounts (a name alone is an admin's). Returns how each logs in."""
    with LocalRepository.open(url, create=True) as repository:
        table = open_accounts(repository.url, repository.objects)
        made, accounts = {}, {}
        for user in users or ("root",):
            name = user if isinstance(user, str) else user.name
            seed = keys.new_seed()
            made[name] = Credentials(name, seed)
            grants = {} if isinstance(user, str) else user.grants
            admin = isinstance(user, str) or user.admin
            accounts[name] = Account(name, keys.public_key(seed), admin, grants)
        table.change(lambda before: {**before, **accounts})
        table.close()
    return made


class Server:
    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        listen: str = "127.0.0.1:0",
        workers: int = 1,
        program: Sequence[str] = (sys.executable, "-m", "diesel_server"),
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"log-{time.time_ns()}"
        command = [*program, "--listen", listen, "--workers", str(workers), *map(str, arguments)]
        if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
            command[:0] = ["setpriv", "--pdeathsig", "KILL"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                cwd=folder,
            )
        self.url = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline().decode()
        finally:
            timer.cancel()
        match = READY.search(line)
        if match is None:
            self.close()
        assert match is not None, f"its first line is {line!r}, its log: {self.log}"
        self.url = match[1]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def metrics_port(self) -> int:
        at = re.compile(r"metrics at http://\S*:(\d+)/")
        until(lambda: at.search(self.log), "the address of its metrics")
        found = at.search(self.log)
        assert found is not None
        return int(found[1])

    @property
    def pid(self) -> int:
        return self.process.pid

    def workers(self) -> list[int]:
        return children(self.pid)

    def resident_bytes(self) -> int:
        return sum(resident_bytes(pid) for pid in self.workers())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 40.0) -> int:
        return self.process.wait(seconds)

    def kill(self) -> None:
        workers = self.workers() if self.process.poll() is None else []
        for pid in (self.pid, *workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        until(lambda: not any(is_running(pid) for pid in workers), "the workers' end")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

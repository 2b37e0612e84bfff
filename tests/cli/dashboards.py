"""`dlcmd dashboard` as a user starts it, and the requests of its page."""

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from tests.waiting import wait_until

from .conftest import program_environment

Object = dict[str, "Value"]
Value = str | int | float | bool | None | list["Value"] | Object


class Got(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Dashboard:
    def __init__(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "dlcmd", "--json", "dashboard", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**program_environment(), **(environment or {})},
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().decode()
        self.url: str = json.loads(self.first_line)["url"]
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def get(self, path: str, method: str = "GET", **headers: str) -> Got:
        """The answer to a request; `_` in the name of a header stands for `-`."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            link.request(method, path, headers=sent)
            answer = link.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Got(answer.status, named, answer.read())
        finally:
            link.close()

    def state(self, after: int = 0) -> Object:
        got = self.get(f"/state?after={after}")
        assert (got.status, got.headers["content-type"]) == (200, "application/json")
        found: Object = json.loads(got.body)
        return found

    def until(self, holds: Callable[[Object], object]) -> Object:
        newest: Object = {}

        def check() -> object:
            nonlocal newest
            tick = newest.get("tick", 0)
            newest = self.state(tick if isinstance(tick, int) else 0)
            return holds(newest)

        wait_until(check, otherwise=lambda: json.dumps(newest))
        return newest


def items(state: Value, kind: str) -> list[Object]:
    found = at(state, kind)
    assert isinstance(found, list)
    return [each for each in found if isinstance(each, dict)]


def item(state: Object, kind: str, **values: Value) -> Object:
    """The first object of a list that has these values; an empty one if there is none."""
    fitting = (
        each
        for each in items(state, kind)
        if all(each.get(key) == value for key, value in values.items())
    )
    return next(fitting, {})


def at(found: Value, *names: str | int) -> Value:
    for name in names:
        if isinstance(found, list) and isinstance(name, int):
            found = found[name]
        else:
            assert isinstance(found, dict)
            found = found[str(name)]
    return found

"""Programs that read on a node of a task by orders: ours, and those of the peers.

Each reads orders as lines of JSON, and answers each with a line of JSON. They run during a whole
benchmark, so that no start of a program is in a figure.
"""

import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.peers.nodes import NodeHost, end

from .samples import progress

HEAD_START_S = 0.5
"""The time for clients that begin together to draw their files."""

RATE = "files/s"
_ANSWER_S = 600.0  # filling a memcached file by file, and refilling it, takes minutes
_END_S = 20.0


class ClientProcess:
    """A program on a node that answers orders. If it ends by itself, `failure` is raised."""

    def __init__(
        self, place: NodeHost, *words: str | Path, failure: type[Exception] = AssertionError
    ) -> None:
        self.place = place
        self._failure = failure
        self._log = (place.folder / f"client-{id(self)}.log").open("w+b")
        self._process = place.start(*words, log=self._log, stdin=subprocess.PIPE)

    def send_order(self, order: Mapping[str, object]) -> None:
        """Send an order; `answer` waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """The answer to the oldest order that has not been answered. A program that does not answer
        is killed."""
        assert self._process.stdout is not None
        timer = threading.Timer(_ANSWER_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._log.seek(0)
            raise self._failure(f"a reader ended: {self._log.read()[-2000:]!r}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, **order: object) -> dict[str, float]:
        self.send_order(order)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            progress("a reader does not end")
        end(self._process)
        self._log.close()


def answers_of(
    clients: Sequence[ClientProcess], orders: Sequence[Mapping[str, object]]
) -> list[dict[str, float]]:
    """Send each client its order, all at once, and wait for their answers."""
    for client, order in zip(clients, orders, strict=True):
        client.send_order(order)
    return [client.answer() for client in clients]


def rate_together(
    clients: Sequence[ClientProcess], seconds: float, order: Mapping[str, object]
) -> dict[str, float]:
    """The files a second that all clients read together from one moment on. Clients may report the
    files that they `missed`: there must be none."""
    order = {**order, "seconds": seconds, "start_s": time.monotonic() + HEAD_START_S}
    answers = answers_of(clients, [{**order, "seed": seed} for seed in range(len(clients))])
    assert not any(each.get("missed") for each in answers), "files are missing from a cache"
    return {RATE: sum(each[RATE] for each in answers)}

"""A real task: a dataset in a store that counts requests, and reader programs on nodes.

    with Nodes(tmp_path, 4) as nodes, RunningTask(nodes, files=2_000) as task:
        readers = [task.reader(rank).ready() for rank in range(4)]
        outcome = readers[0].epoch(seed=1)
        task.end()                              # ends all processes on nodes; the dataset stays

The store is the tests' own S3 server in the shared place, and the metadata are in Redis there, so
the requests of all nodes are counted in one list.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from redis import Redis

from tests.waiting import until

from ..storage.objects.s3_server import credentials
from ..storage.objects.scripted_s3 import BUCKET, RecordedRequest, ScriptedS3
from .contents import make
from .nodes import NodeHost, Nodes, end, mounts_below

DATASET = "images"
TASK = "training"
CHUNK_BYTES = 64 << 10
OWN_BYTES = 1 << 20
"""The memory of a reader alone: if a dataset fitted it, a second epoch would make no request."""

ANSWER_S = 90.0
PUT_S = 300.0
SECRET = "a secret of these tests alone, and long enough"  # noqa: S105  # of these tests alone
_STATS = struct.pack("<BBHIII", 6, 0, 0, 0, 0, 0)  # a client's request, of PEERS.md section 4
_CHUNK = re.compile(r"/chunks/")


WAIT_MAX_S = 90.0  # every awaited event comes much earlier, on a busy machine too


@dataclass(frozen=True, slots=True)
class Outcome:
    right: int
    wrong: int
    errors: list[str]
    worst_s: float
    s: float


class Reader:
    """A training process on a node (`reader_program.py`)."""

    def __init__(self, place: NodeHost, opened: Mapping[str, object], files: int) -> None:
        self.place = place
        self.opened = dict(opened)
        self._files = files
        self._log_path = place.folder / f"reader-{id(self)}.log"
        with self._log_path.open("wb") as log:
            self.process = place.start(
                *(sys.executable, "-m", "tests.peers.reader_program"),
                log=log, stdin=subprocess.PIPE,
            )  # fmt: skip
        self._send(opened)

    def ready(self) -> Self:
        assert self._answer() == {"ready": True}
        return self

    def begin(self, seed: int, *, batch: int = 64, pace_s: float = 0.0) -> None:
        order = {"do": "epoch", "files": self._files, "seed": seed, "batch": batch}
        self._send({**order, "pace_s": pace_s})

    def begin_planned(
        self, epoch: int, rank: int, world: int, *, group: int, batch: int, pace_s: float,
        announced: str,
    ) -> None:  # fmt: skip
        """`outcome` waits for its end."""
        numbers = {"epoch": epoch, "rank": rank, "group": group, "batch": batch}
        more = {"world": world, "pace_s": pace_s, "announced": announced}
        self._send({"do": "planned", **numbers, **more})

    def outcome(self) -> Outcome:
        return Outcome(**self._answer())  # type: ignore[arg-type]  # as the program says it

    def epoch(self, seed: int, *, batch: int = 64, pace_s: float = 0.0) -> Outcome:
        self.begin(seed, batch=batch, pace_s=pace_s)
        return self.outcome()

    def stats(self) -> dict[str, object]:
        self._send({"do": "stats"})
        return self._answer()

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def close(self) -> None:
        """Close its stdin, at which it ends; kill it if it does not end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        end(self.process)

    def _send(self, order: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        timer = threading.Timer(ANSWER_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"a reader ended: {self.log[-3000:]}"
        answer: dict[str, object] = json.loads(line)
        return answer


class RunningTask:
    def __init__(
        self,
        nodes: Nodes,
        *,
        files: int,
        source: Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """The files of `source` are put if there is one."""
        self.nodes = nodes
        self.files = files
        self.name = TASK
        self.world = len(nodes)
        self.part = 0.0  # the part of the dataset that a master's memory holds; 0 for the default
        self.options: dict[str, str] = {}  # of `dlcmd mount`, for each node
        self._names = itertools.count(1)
        self.bytes = 0
        self.stored_bytes = 0  # of all chunks together
        self._source, self._chunk_bytes = source, chunk_bytes
        self._stack = contextlib.ExitStack()
        self._readers: list[Reader] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.redis: Redis = self.nodes.start_redis()
            with self.nodes.shared.entered():
                self.s3 = ScriptedS3(address=(self.nodes.shared.address, 0))
            stack.enter_context(self.s3)
            self.url = f"s3://{BUCKET}/data?meta={self.nodes.redis_url}"
            for place in (*self.nodes, self.nodes.shared):
                proxies = [name for name in place.environment if "proxy" in name.lower()]
                for proxy in proxies:
                    del place.environment[proxy]
                place.environment |= {**credentials(self.s3.endpoint), "DIESEL_URL": self.url}
            source = self._source or self.nodes.folder / "source"
            self.bytes = 0 if self._source else make(source, self.files)
            self.nodes.shared.dlcmd(
                *("put", "--chunk-size", str(self._chunk_bytes), "--compress", "none"),
                *(source, DATASET),
                timeout_s=PUT_S,
            )
            objects = self.s3.objects.items()
            self.stored_bytes = sum(
                len(each.content) for key, each in objects if _CHUNK.search(key)
            )
            self.forget()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()  # readers must not wait for a store that is gone
        self._stack.close()

    def end(self) -> None:
        """End all processes on nodes as a crash does. The next readers are another task."""
        for reader in self._readers:
            end(reader.process)
        self._readers.clear()
        for place in self.nodes:
            place.kill()
            for point in mounts_below(place.folder):
                subprocess.run(["umount", "-l", point], check=True)
            runtime = Path(place.environment["XDG_RUNTIME_DIR"])
            for left in runtime.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.name = f"{TASK}{next(self._names)}"
        self.world, self.options, self.part = len(self.nodes), {}, 0.0
        self.s3.delay_s = 0.0

    # Readers

    def mount(self, rank: int, *options: str) -> Path:
        place = self.nodes[rank]
        folder = place.folder / f"mount-{self.name}"
        folder.mkdir(exist_ok=True)
        words = [word for name, text in self._given(rank).items() for word in (f"--{name}", text)]
        place.dlcmd("mount", *words, *options, DATASET, folder)
        return folder

    def umount(self, rank: int) -> None:
        self.nodes[rank].dlcmd("umount", self.nodes[rank].folder / f"mount-{self.name}")

    def reader(self, rank: int, mount: Path | None = None, **more: object) -> Reader:
        opened: dict[str, object] = {"mount": str(mount)}
        if mount is None:
            given = {name.replace("-", "_"): text for name, text in self._given(rank).items()}
            peers = given.pop("peers", "")
            numbers = {"rank": rank, "world": self.world, "memory_bytes": OWN_BYTES}
            opened = {"dataset": DATASET, **given, **numbers, **more}
            if self.part:
                opened["task_memory_bytes"] = int(self.part * self.stored_bytes)
            if peers:
                opened["peers"] = peers.split(",")
        reader = Reader(self.nodes[rank], opened, self.files)
        self._readers.append(reader)
        return reader

    def _given(self, rank: int) -> dict[str, str]:
        given = {
            "task": self.name,
            "rank": str(rank),
            "world": str(self.world),
            "listen": f"{self.nodes[rank].address}:0",
            **self.options,
        }
        return {name: text for name, text in given.items() if text}

    # Results

    def masters(self, rank: int) -> list[int]:
        return self.nodes[rank].matching("diesel_fs.peers")

    def socket(self, rank: int) -> Path:
        runtime = Path(self.nodes[rank].environment["XDG_RUNTIME_DIR"])
        until(lambda: [*runtime.rglob("socket")], "a master's socket")
        return next(runtime.rglob("socket"))

    def stats(self, rank: int) -> dict[str, object]:
        """The statistics of a master, once it has come up."""
        found: list[dict[str, object]] = []

        def answers() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                found.append(stats_at(self.socket(rank)))
            return bool(found)

        until(answers, f"a master of node {rank} that answers", WAIT_MAX_S)
        return found[0]

    def figure(self, rank: int, *names: str) -> int:
        found: object = self.stats(rank)
        for name in names:
            found = cast("dict[str, object]", found)[name]
        assert isinstance(found, int)
        return found

    def damaged(self, rank: int) -> int:
        peers = cast("dict[str, dict[str, int]]", self.stats(rank)["peers"])
        return sum(each["damaged"] for each in peers.values())

    def gathered(self, ranks: "range | list[int] | None" = None, count: int = 0) -> None:
        wanted = list(range(self.world) if ranks is None else ranks)
        for rank in wanted:
            until(
                lambda rank=rank: self.figure(rank, "members") == (count or len(wanted)),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                f"{count or len(wanted)} members at node {rank}",
                WAIT_MAX_S,
            )

    def forget(self) -> None:
        self.s3.requests.clear()

    def gets(self) -> Counter[str]:
        return Counter(each.key for each in self._chunk_reads())

    def egress_bytes(self) -> int:
        return sum(self._size(each.key, each.headers.get("range")) for each in self._chunk_reads())

    def _chunk_reads(self) -> list[RecordedRequest]:
        return [each for each in [*self.s3.requests] if each.method == "GET"
                and _CHUNK.search(each.key)]  # fmt: skip

    def _size(self, key: str, wanted: str | None) -> int:
        size = len(self.s3.objects[key].content)
        if not wanted:
            return size
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        return min(int(last or size), size - 1) - int(first) + 1


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as link:
        folder = os.open(path.parent, os.O_PATH)
        try:
            link.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        link.settimeout(10)
        yield link


def stats_at(path: Path) -> dict[str, object]:
    with connected(path) as link:
        link.sendall(_STATS)
        with link.makefile("rb") as stream:
            _, _, status, _, size, _ = struct.unpack("<BBHIII", stream.read(16))
            body = stream.read(size)
    assert status == 0, body
    figures: dict[str, object] = json.loads(body)
    return figures


def is_right(outcome: Outcome, files: int) -> bool:
    return (outcome.right, outcome.wrong, outcome.errors) == (files, 0, [])

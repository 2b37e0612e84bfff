"""Benchmarks of small changes to datasets of millions of empty files: a put of one file, a mount
that follows, the first mount of a version.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.storage.metadata.redis_servers import RedisServer

from ..dlcmd import Dlcmd
from ..inputs import Shape
from ..memory import Usage, usage_of
from ..report import Row, no_more_than
from ..samples import repeat
from ..store import STORE_BYTES_PER_S, STORE_S, SlowStore, serving
from ..workbench import Workbench

E1M, E4M, E20M = (Shape(f"E{n}M", n * 1_000_000, 1_000, 0) for n in (1, 4, 20))
PUT_S, PUT_MB, PUT_PEAK_MB = 0.6, 2, 150
MANY, MANY_KB = 100, 100
FOLLOW_KB, FOLLOW_S = 100, 1
UNSEEN_S = {E1M: 1.0, E4M: 1.0, E20M: 3.0}
SEEN_S = 0.3
SEEN_DEADLINE_S = 90.0

ONE = "whole command; the writer has a private copy of an earlier version"
FOLLOWED = "from the end of the put; the mount looks for versions every 5 s"
READ = "sent by the store from the start of the put on"
PEAK = "anonymous MB"
STAYS = "what the repository has more at the end"


def write_tar(path: Path, shape: Shape) -> None:
    """A tar of empty files, header by header as columns."""
    header = np.zeros(512, np.uint8)
    numbers = (b"0000644", b"0000000", b"0000000", b"00000000000", b"14000000000", b" " * 8)
    fields = {100: b"\0".join(numbers), 156: b"0", 257: b"ustar\x0000"}
    for at, text in fields.items():
        header[at : at + len(text)] = np.frombuffer(text, np.uint8)
    with path.open("wb") as file:
        for number in range(shape.folders):
            names = [f"c{number:07}/f{i:07}".encode() for i in range(shape.files_per_folder)]
            block = np.tile(header, (len(names), 1))
            block[:, : len(names[0])] = np.frombuffer(b"".join(names), np.uint8).reshape(
                len(names), -1
            )
            sums = b"".join(b"%06o\0 " % each for each in block.sum(axis=1).tolist())
            block[:, 148:156] = np.frombuffer(sums, np.uint8).reshape(len(names), 8)
            file.write(block.data)
        file.write(bytes(1024))


class Writer:
    """A user who has put the dataset, and puts single files into it."""

    def __init__(self, dlcmd: Dlcmd, shape: Shape, folder: Path) -> None:
        write_tar(folder / "files.tar", shape)
        dlcmd.seconds("put", "--tar", str(folder / "files.tar"), shape.name)
        (folder / "files.tar").unlink()
        self.dlcmd = dlcmd
        self._to, self._folder, self._count = f"{shape.name}/new/", folder, 0

    def new_file(self) -> Path:
        self._count += 1
        file = self._folder / f"new{self._count}"
        file.write_bytes(b"x")
        return file

    def put(self, file: Path) -> float:
        return self.dlcmd.seconds("put", str(file), self._to)

    def usage(self) -> Usage:
        """Of one more put."""
        command = self.dlcmd.command("put", str(self.new_file()), self._to)
        return usage_of(command, self.dlcmd.environment)


def put_one(wanted: Shape) -> Callable[[Workbench], list[Row]]:
    """Put one file, then a hundred."""

    def measure(bench: Workbench) -> list[Row]:
        shape = bench.shape(wanted)
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder)
            writer = Writer(dlcmd, shape, folder)

            def one() -> dict[str, float]:
                seconds, used = writer.put(writer.new_file()), writer.usage()
                return {"s": seconds, "MB": used.written / 1e6, PEAK: used.anonymous / 1e6}

            def many() -> dict[str, float]:
                before = dlcmd.stored_bytes()
                for _ in range(MANY):
                    writer.put(writer.new_file())
                return {"kB": (dlcmd.stored_bytes() - before) / MANY / 1e3}

            one()  # the user has a private copy now
            ones, hundred = repeat(bench.rounds, one), repeat(1, many)
        name = f"put one file into {shape.name}"
        return [
            no_more_than(name, "s", ones.ours("s"), PUT_S, ONE),
            no_more_than(
                name,
                "MB",
                ones.ours("MB"),
                PUT_MB,
                "written by the process, metadata and journals too",
            ),
            no_more_than(name, PEAK, ones.ours(PEAK), PUT_PEAK_MB),
            no_more_than(f"{name}, {MANY} times: each", "kB", hundred.ours("kB"), MANY_KB, STAYS),
        ]

    return measure


def mounted(wanted: Shape) -> Callable[[Workbench], list[Row]]:
    """A mount that follows, after a put of one file by a user who shares no cache with it; then
    the first mount of a version, and another one."""

    def measure(bench: Workbench) -> list[Row]:
        shape = bench.shape(wanted)
        with (
            bench.scratch() as folder,
            serving(folder, delay_s=STORE_S, bytes_per_s=STORE_BYTES_PER_S) as store,
            RedisServer(folder / "redis") as redis,
        ):
            dlcmd = Dlcmd(folder, store=store.bucket)
            dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={redis.url}"
            writer, slow = Writer(dlcmd, shape, folder), SlowStore(store, redis.url, 0)
            writer.put(writer.new_file())

            def sides() -> dict[str, float]:
                with bench.scratch() as own:
                    reader, file = slow.user(own), writer.new_file()
                    with reader.mounted(shape.name, own / "mount", "--follow") as mount:
                        before = store.counts()
                        writer.put(file)
                        found = {"s": _seconds_until(mount.path / "new" / file.name)}
                        found["kB"] = (store.counts() - before).bytes / 1e3
                    writer.put(writer.new_file())
                    for name in ("unseen", "seen"):
                        with reader.mounted(shape.name, own / "mount") as mount:
                            found[name] = mount.seconds
                    return found

            rounds = repeat(bench.rounds, sides)
        name, unseen = f"mount of {shape.name}", "a version not seen before"
        return [
            no_more_than(f"{name}, one file later", "s", rounds.ours("s"), FOLLOW_S, FOLLOWED),
            no_more_than(f"{name}, one file later", "kB", rounds.ours("kB"), FOLLOW_KB, READ),
            no_more_than(f"{name}, {unseen}", "s", rounds.ours("unseen"), UNSEEN_S[wanted]),
            no_more_than(f"{name}, a version seen before", "s", rounds.ours("seen"), SEEN_S),
        ]

    return measure


def _seconds_until(file: Path) -> float:
    """Until a file of one byte can be read."""
    start_s = time.perf_counter()
    while not file.exists():
        assert time.perf_counter() < start_s + SEEN_DEADLINE_S, f"{file} does not appear"
        time.sleep(0.01)
    assert file.read_bytes() == b"x"
    return time.perf_counter() - start_s

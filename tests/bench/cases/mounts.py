"""Benchmarks of mounts: the time until one is ready, and the rate of reading and listing files.

`kernel-*` measure the kernel session, which needs no rights. `native-*` measure mounts of
`bench.session`, mostly the one with its tree in the kernel, and the rates of ordinary Python code
on it; another session gives the figures to compare with.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D4, D4L, D110, F4G, N1M, Shape
from ..peers import python
from ..peers.trees import EROFS, RATARMOUNT, SQUASHFS, SQUASHFUSE, TMPFS, in_memory
from ..plot import Plot, plot_medians
from ..reading import PIECES, STOCK, SYSTEM_CALLS, Order, ReadReport, random_order, run_loop
from ..report import Row, Target, against, at_least, at_most, no_more_than, worst
from ..samples import OURS, NotMeasured, PeerMissing, Rounds, Side, alternate, repeat
from ..stored import EXT4, Stored, stored
from ..workbench import Workbench

KERNEL, PYFUSE3 = ("--session", "kernel"), ("--session", "pyfuse3")
ONESHOT = ("--policy", "oneshot")
RATE, READS, MOUNTING, REQUESTS = "files/s", "READs a file", "mount s", "requests"
ON_DEMAND, OVER_PYFUSE3 = "ours, on demand", "our pyfuse3 session"
FIRST_RATIO: Mapping[Shape, float] = {D4: 4, D4L: 4, D110: 2}
PYFUSE3_RATIO = {1: 1.5, 2: 1.3}

READERS = (1, 2, 4, 8, 16)
SHOWN = {
    TMPFS: TMPFS,
    OURS: "DIESEL-FS, kernel session",
    **{side: side for side in (OVER_PYFUSE3, SQUASHFUSE, RATARMOUNT)},
}
PLOT = Plot(
    "readers",
    "20,000 files of 4 KiB in random order, second and later epochs",
    "readers at once",
    "files read a second",
    READERS,
)

OTHER_VERSION = "3.13"
LOOPS = ((STOCK, 1), (STOCK, 4), (STOCK, 16), (SYSTEM_CALLS, 1))
"""The loops that read resident files, and their numbers of processes."""
PROCESSOR = "% of a core"
KERNEL_SESSION = "our kernel session"
DISK, GIGABYTES = "the file on the disk", "GB/s"
END_S = 40.0  # a node's cache writes for at most 20 s
FIRST_OWNER = 20_000  # a user ID that no other mount of the bench shows


def readers_text(count: int) -> str:
    return f"{count} reader{'s' * (count > 1)}"


def kernel_epochs(bench: Workbench) -> list[Row]:
    """D4 in its second epoch, in another order, by one reader and by two."""
    rows: list[Row] = []
    counted = "READs, OPENs and GETATTRs in the epoch, in the worst round"
    with stored(bench, bench.shape(D4)) as data:

        def run(side: str, readers: int) -> dict[str, float]:
            first, second = data.orders(side, 2)
            with data.opened(side, *KERNEL, *ONESHOT) as tree:
                bench.read_epoch(first, walk=tree.root)
                before = tree.requests()
                report = bench.read_epoch(second, readers=readers)
                return {RATE: report.files_per_s, REQUESTS: tree.requests() - before}

        for readers in (1, 2):
            sides = {side: partial(run, side, readers) for side in (OURS, TMPFS, EXT4)}
            rounds = alternate(bench.rounds, sides)
            name = f"kernel {data.shape.name}, second epoch, {readers_text(readers)}"
            rows += against(rounds, name, RATE, {TMPFS: at_least(0.65), EXT4: at_least(0.8)})
            rows.append(no_more_than(name, REQUESTS, worst(rounds.ours(REQUESTS)), 0, counted))
    return rows


def kernel_readers(bench: Workbench) -> list[Row]:
    """1 to 16 readers at once in later epochs of D4: the rates of an epoch that they share, in an
    order of its own, after a first epoch."""
    with stored(bench, bench.shape(D4)) as data:

        def rates(side: str, *options: str) -> dict[str, float]:
            first, *others = data.orders(side, len(READERS) + 1)
            with data.opened(side, *options) as tree:
                bench.read_epoch(first, walk=tree.root)
                return {
                    str(readers): bench.read_epoch(order, readers=readers).files_per_s
                    for readers, order in zip(READERS, others, strict=True)
                }

        sides: dict[str, Side] = {
            OURS: partial(rates, OURS, *KERNEL, *ONESHOT),
            **{peer: partial(rates, peer) for peer in (TMPFS, SQUASHFUSE, RATARMOUNT)},
            OVER_PYFUSE3: partial(rates, OURS, *PYFUSE3),
        }
        rounds = alternate(bench.rounds, sides)
    plot_medians(bench, PLOT, rounds, SHOWN)
    peers = dict.fromkeys((TMPFS, SQUASHFUSE, RATARMOUNT, OVER_PYFUSE3))
    rows: list[Row] = []
    for count in READERS:
        name = f"kernel {data.shape.name}, {readers_text(count)}"
        rows += against(rounds, name, RATE, peers, of=str(count))
    return rows


def kernel_reads(bench: Workbench) -> list[Row]:
    """D4 without anything in the page cache, so that each file costs a READ, against pyfuse3."""
    rows: list[Row] = []
    with stored(bench, bench.shape(D4)) as data:

        def run(options: tuple[str, ...], readers: int) -> dict[str, float]:
            [order] = data.orders(OURS, 1)
            with data.opened(OURS, *options) as tree:
                if tree.mount is not None:
                    tree.mount.stop_pushing()
                report = bench.read_epoch(order, readers=readers, walk=tree.root)
                return {RATE: report.files_per_s, READS: tree.reads() / data.shape.files}

        for readers, ratio in PYFUSE3_RATIO.items():
            named = {OURS: KERNEL, OVER_PYFUSE3: PYFUSE3}
            sides = {side: partial(run, options, readers) for side, options in named.items()}
            rounds = alternate(bench.rounds, sides)
            name = f"kernel {data.shape.name}, one READ a file, {readers_text(readers)}"
            note = "a fresh mount that was walked; no helper"
            rows += against(rounds, name, RATE, {OVER_PYFUSE3: at_least(ratio)}, note)
            rows.append(Row(name, READS, rounds.ours(READS)))
    return rows


def read_first_epoch(
    data: Stored, side: str, *options: str, python: str = "", cold: bool = False
) -> dict[str, float]:
    """Read all files once from a fresh mount, after a walk of its folders.

    The rate counts from the moment at which the mount is ready. `python` is the interpreter of the
    stock loop; if it is empty, the C reader reads. A `cold` side begins with no content in the page
    cache.
    """
    [order] = data.orders(side, 1)
    data.prepare(side, cold=cold)
    with data.reader(python, order) as read, data.mounted(side, *options) as tree:
        rate = data.shape.files / (read().end_s - tree.ready_s)
        reads = 0 if python else tree.reads()
        if python:
            data.bench.read_epoch(order)  # the stock loop has not looked at contents
    return {RATE: rate, READS: reads / data.shape.files, MOUNTING: tree.mount_s}


def kernel_first(bench: Workbench) -> list[Row]:
    """The first epoch on a fresh mount, from the moment at which it is ready, with a walk of its
    folders."""
    rows: list[Row] = []
    since = "from the return of the mount command on, with a walk of all folders; one reader"
    for wanted, ratio in FIRST_RATIO.items():
        with stored(bench, bench.shape(wanted)) as data:
            data.mount_once()
            read = partial(read_first_epoch, data)
            sides: dict[str, Side] = {
                OURS: partial(read, OURS, *KERNEL, *ONESHOT),
                SQUASHFUSE: partial(read, SQUASHFUSE),
            }
            if wanted is D4:
                sides[ON_DEMAND] = partial(read, OURS, *KERNEL, "--policy", "on-demand")
            rounds = alternate(bench.rounds, sides)
        name = f"kernel {wanted.name}, first epoch, oneshot"
        rows += against(rounds, name, RATE, {SQUASHFUSE: at_least(ratio)}, since)
        rows.append(Row(name, READS, rounds.ours(READS)))
        rows += against(rounds, f"{name}, mount command", "s", {SQUASHFUSE: None}, of=MOUNTING)
        if wanted is D4:
            name, target = (
                f"kernel {wanted.name}, first epoch, on-demand",
                {SQUASHFUSE: at_least(2)},
            )
            rows += against(rounds, name, RATE, target, "no plan; as above", side=ON_DEMAND)
            rows.append(no_more_than(name, READS, rounds.of(ON_DEMAND, READS), 0.2))
    return rows


def native_first(bench: Workbench) -> list[Row]:
    """D4 on a fresh mount, against squashfuse, our kernel session, and the kernel's packed
    images."""
    session, stock, images = bench.session_options, sys.executable, (SQUASHFS, EROFS)
    policies = ("on-demand", "oneshot")
    with stored(bench, bench.shape(D4)) as data:
        data.mount_once(*session)
        read = partial(read_first_epoch, data)
        sides: dict[str, Side] = {SQUASHFUSE: partial(read, SQUASHFUSE)}
        for policy in policies:
            for side, options in ((OURS, session), (KERNEL_SESSION, KERNEL)):
                words = (OURS, *options, "--policy", policy)
                sides[f"{side}, {policy}, C"] = partial(read, *words)
                sides[f"{side}, {policy}"] = partial(read, *words, python=stock)
            words = (OURS, *session, "--policy", policy)
            sides[f"{OURS}, {policy}, cold"] = partial(read, *words, python=stock, cold=True)
        for peer in images:
            sides[peer] = partial(read, peer, python=stock)
            sides[f"{peer}, cold"] = partial(read, peer, python=stock, cold=True)
        rounds = alternate(bench.rounds, sides)
    rows = []
    for policy in policies:
        ours, kernel = f"{OURS}, {policy}", f"{KERNEL_SESSION}, {policy}"
        compared: list[tuple[str, str, str, str, Target | None]] = [
            ("C reader", f"{ours}, C", SQUASHFUSE, SQUASHFUSE, None),
            ("C reader", f"{ours}, C", KERNEL_SESSION, f"{kernel}, C", at_least(1)),
            (STOCK, ours, KERNEL_SESSION, kernel, at_least(2)),
            *((f"{STOCK}, warm", ours, peer, peer, at_least(0.95)) for peer in images),
            *(
                (f"{STOCK}, cold", f"{ours}, cold", peer, f"{peer}, cold", at_least(0.7))
                for peer in images
            ),
        ]
        for what, own, peer, other, target in compared:
            name = f"{bench.session} {D4.name}, first epoch, {policy}, {what}"
            figures = rounds.of(own, RATE), peer, rounds.of(other, RATE)
            rows.append(Row(name, RATE, *figures, target))
    return rows


def native_second(bench: Workbench) -> list[Row]:
    """D4 resident, read by loops of this Python and of another one, against tmpfs."""
    options = (*bench.session_options, *ONESHOT)
    loops, missing = _loops()
    with stored(bench, bench.shape(D4)) as data:

        def rates(orders: list[Order]) -> dict[str, float]:
            some = zip(loops.items(), orders, strict=True)
            return {name: read(order).files_per_s for (name, read), order in some}

        def ours() -> dict[str, float]:
            first, *others = data.orders(OURS, len(loops) + 1)
            with data.opened(OURS, *options) as tree:
                mount = tree.mount
                assert mount is not None
                bench.read_epoch(first, walk=tree.root)
                # Reading the statistics makes requests, too; the first time makes other ones.
                _, once, twice = mount.counts(), mount.counts(), mount.counts()
                bench.read_epoch(first)  # the kernel may have reclaimed pages that were idle
                before = mount.counts()
                own_s, start_s = mount.processor_s(before.supervisor), time.monotonic()
                found = rates(others)
                own_s = mount.processor_s(before.supervisor) - own_s
                seconds = time.monotonic() - start_s
                requests = mount.counts().all - before.all - (twice.all - once.all)
                bench.read_epoch(first)  # the loops have not looked at contents
            return {**found, REQUESTS: max(requests, 0), PROCESSOR: 100 * own_s / seconds}

        def theirs() -> dict[str, float]:
            first, *others = data.orders(TMPFS, len(loops) + 1)
            bench.read_epoch(first, walk=data.root(TMPFS))
            return rates(others)

        rounds = alternate(bench.rounds, {OURS: ours, TMPFS: theirs})
    name, target = f"{bench.session} {data.shape.name}, second epoch", at_least(0.9)
    rows: list[Row] = []
    for each in loops:
        rows += against(rounds, f"{name}, {each}", RATE, {TMPFS: target}, of=each)
    counted = "of any kind, in all these epochs together, in the worst round"
    used = "the processor time of the mount's processes during these epochs"
    return [
        *rows,
        *(Row(f"{name}, {each}", RATE, why, TMPFS, why, target) for each, why in missing.items()),
        no_more_than(name, REQUESTS, worst(rounds.ours(REQUESTS)), 0, counted),
        no_more_than(name, PROCESSOR, rounds.ours(PROCESSOR), 1, used),
    ]


def _loops() -> tuple[dict[str, Callable[[Order], ReadReport]], dict[str, NotMeasured]]:
    """The loops of this Python and of another one, by name, and those that are missing here."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    loops: dict[str, Callable[[Order], ReadReport]] = {}
    missing = {}
    for version in dict.fromkeys((own, OTHER_VERSION)):
        for loop, processes in LOOPS:
            many = f"{processes} process{'es' * (processes > 1)}"
            name = f"{loop}, Python {version}, {many}"
            try:
                program = sys.executable if version == own else python(version)
            except PeerMissing as error:
                missing[name] = NotMeasured(str(error))
            else:
                loops[name] = partial(run_loop, program, loop=loop, processes=processes)
    return loops, missing


def native_larger(bench: Workbench) -> list[Row]:
    """D110, all loaded from the start, against squashfuse."""
    session = bench.session_options
    with stored(bench, bench.shape(D110)) as data:
        data.mount_once(*session)
        sides: dict[str, Side] = {
            OURS: partial(read_first_epoch, data, OURS, *session, *ONESHOT),
            SQUASHFUSE: partial(read_first_epoch, data, SQUASHFUSE),
        }
        rounds = alternate(bench.rounds, sides)
    name = f"{bench.session} {D110.name}, first epoch, oneshot"
    note = "C reader; with a walk of all folders"
    return against(rounds, name, RATE, {SQUASHFUSE: at_least(3)}, note)


def native_file(bench: Workbench) -> list[Row]:
    """A file of 4 GiB from begin to end; neither its chunks, in the disk cache, nor the file that
    it is compared with are in the page cache."""
    shape = replace(F4G, file_bytes=F4G.file_bytes // bench.divisor)
    with stored(bench, shape) as data:
        chunks = data.folder / "chunks"
        cache_options = ("--cache-dir", str(chunks), "--cache-size", str(2 * shape.bytes))
        options = (*bench.session_options, *cache_options)
        roots = data.mountpoint, data.source
        on_mount, on_disk = (random_order(shape, root, 0, data.folder) for root in roots)
        with data.mounted(OURS, *options):
            bench.read_epoch(on_mount)  # checks the contents
        _end_users_of(chunks)  # the node's cache writes its chunks to the disk at its end
        cached = sum(path.stat().st_size for path in chunks.rglob("*") if path.is_file())
        assert cached >= shape.bytes, f"the disk cache has {cached} bytes"

        def rate(order: Order) -> dict[str, float]:
            report = run_loop(sys.executable, order, PIECES)
            return {GIGABYTES: report.bytes / report.seconds / 1e9}

        def ours() -> dict[str, float]:
            data.prepare(OURS, cold=True)
            try:
                with data.mounted(OURS, *options):
                    return rate(on_mount)
            finally:
                _end_users_of(chunks)  # so that the next round finds them only on the disk

        def theirs() -> dict[str, float]:
            bench.drop_page_cache(data.source)
            return rate(on_disk)

        rounds = alternate(bench.rounds, {OURS: ours, DISK: theirs})
    name, note = f"{bench.session} one file of 4 GiB", f"{PIECES}; chunks in the disk cache; cold"
    return against(rounds, name, GIGABYTES, {DISK: at_least(0.8)}, note)


def _end_users_of(folder: Path) -> None:
    """End the processes that have a file below this folder open, and wait until they are gone."""
    end_s = time.monotonic() + END_S
    ended: set[int] = set()
    while users := _users_of(folder):
        for pid in users - ended:
            os.kill(pid, signal.SIGTERM)
        ended |= users
        assert time.monotonic() < end_s, f"the processes {users} did not end"
        time.sleep(0.05)


def _users_of(folder: Path) -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if Path(os.readlink(link)).is_relative_to(folder):
                found.add(int(link.parts[2]))
    return found


def kernel_ls(bench: Workbench) -> list[Row]:
    """`ls -lR` of N1M on a fresh mount, and again on the same mount."""
    rounds = _listed(bench, {OURS: KERNEL, OVER_PYFUSE3: PYFUSE3})
    rows = _ls_rows(rounds, OURS, "kernel", at_most(3), at_most(1.5))
    return rows + _ls_rows(rounds, OVER_PYFUSE3, "pyfuse3", at_most(8), None)


def native_ls(bench: Workbench) -> list[Row]:
    rounds = _listed(bench, {OURS: bench.session_options})
    return _ls_rows(rounds, OURS, bench.session, at_most(1.4), at_most(0.85))


def _listed(bench: Workbench, sessions: Mapping[str, tuple[str, ...]]) -> Rounds:
    """Lists mounts of some sessions, and the same tree in tmpfs."""
    shape, dlcmd = bench.shape(N1M), bench.n1m
    with ExitStack() as stack:
        tree = cache(lambda: stack.enter_context(in_memory(shape)))

        def ours(options: tuple[str, ...]) -> dict[str, float]:
            with (
                bench.scratch() as folder,
                dlcmd.mounted(shape.name, folder / "mount", *options) as mount,
            ):
                return {"first": _ls_seconds(mount.path), "again": _ls_seconds(mount.path)}

        def theirs() -> dict[str, float]:
            return dict.fromkeys(("first", "again"), _ls_seconds(tree()))

        sides: dict[str, Side] = {side: partial(ours, each) for side, each in sessions.items()}
        return alternate(bench.rounds, {**sides, TMPFS: theirs})


def _ls_rows(
    rounds: Rounds, side: str, session: str, first: Target, again: Target | None
) -> list[Row]:
    name = f"{session} ls -lR of {N1M.name}"
    return [
        *against(rounds, name, "s", {TMPFS: first}, "a fresh mount", of="first", side=side),
        *against(rounds, f"{name}, again", "s", {TMPFS: again}, of="again", side=side),
    ]


def _ls_seconds(folder: Path) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    start_s = time.perf_counter()
    subprocess.run(["ls", "-lR", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s


def ready(bench: Workbench) -> list[Row]:
    """The time from the start of `dlcmd mount` to its return, for N1M with its snapshot in the
    store."""

    def seconds(*, first: bool) -> dict[str, float]:
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder, store=bench.n1m.store) if first else bench.n1m
            with dlcmd.mounted(N1M.name, folder / "mount") as mount:
                assert (mount.path / "class0000").is_dir()
                return {"seconds": mount.seconds}

    adopted = repeat(bench.rounds, lambda: seconds(first=True)).ours("seconds")
    seconds(first=False)  # makes the user's copy of the snapshot, which the timed runs then use
    ours = repeat(bench.rounds, lambda: seconds(first=False)).ours("seconds")
    name = f"mount {N1M.name}, ready"
    own, none = "over this user's own copy of the snapshot", "the copy is made from the store's"
    return [
        no_more_than(name, "s", ours, 1, own),
        no_more_than(f"{name}, the first time", "s", adopted, 1, none),
    ]


def native_start(bench: Workbench) -> list[Row]:
    """The time from the start of `dlcmd mount` to the first byte of a file of N1M over
    `bench.session`, with the image that an earlier mount made, and with none."""
    dlcmd, session = bench.n1m, bench.session_options
    with bench.scratch() as source:
        (source / "file").write_bytes(bytes(D4.file_bytes))
        dlcmd.seconds("put", str(source), f"{N1M.name}/first")
    owners = iter(range(FIRST_OWNER, FIRST_OWNER + bench.rounds))

    def seconds(*options: str) -> dict[str, float]:
        bench.warm_page_cache(dlcmd.store)
        with (
            bench.scratch() as folder,
            dlcmd.mounted(N1M.name, folder / "mount", *session, *options) as mount,
        ):
            with (mount.path / "first" / "file").open("rb", buffering=0) as file:
                file.read(1)
            return {"seconds": time.monotonic() - (mount.ready_s - mount.seconds)}

    seconds()  # makes this user's copy of the snapshot, and the image
    kept = repeat(bench.rounds, seconds).ours("seconds")
    made = repeat(bench.rounds, lambda: seconds("--uid", str(next(owners)))).ours("seconds")
    name = f"{bench.session} mount {N1M.name}, to the first byte"
    other = "for another owner of all entries, so that there is no image of it"
    return [
        no_more_than(f"{name}, image kept", "s", kept, 0.5),
        no_more_than(f"{name}, image made anew", "s", made, 3, other),
    ]

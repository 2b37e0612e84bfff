"""The mount, over the portable FUSE session."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..dlcmd import Dlcmd
from ..inputs import D4, N1M
from ..peers import ratarmount, tar, tmpfs
from ..reader import read_files, write_list
from ..report import Row, at_least, at_most, within
from ..samples import OURS, PeerMissing, alternate, repeat
from ..workbench import Workbench

LS_RATIO = 8
READY_S = 1
READ_RATIO = 1
EPOCHS = ("first epoch", "second epoch")


def ready(bench: Workbench) -> list[Row]:
    """From the start of `dlcmd mount` to its return, of N1M with its snapshot in the store."""

    def first() -> dict[str, float]:
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder, store=bench.n1m.store)  # of a user who has not read it
            return _mount_seconds(dlcmd, folder)

    def again() -> dict[str, float]:
        with bench.scratch() as folder:
            return _mount_seconds(bench.n1m, folder)

    adopted = repeat(bench.rounds, first).ours("seconds")
    again()  # adopts the snapshot, so that the others need not
    ours = repeat(bench.rounds, again).ours("seconds")
    name = f"mount {N1M.name}, ready"
    own, none = "over this user's own copy of the snapshot", "the copy is made from the store's"
    return [
        within(name, "s", ours, READY_S, most=True, note=own),
        within(f"{name}, the first time", "s", adopted, READY_S, most=True, note=none),
    ]


def _mount_seconds(dlcmd: Dlcmd, folder: Path) -> dict[str, float]:
    with dlcmd.mounted(N1M.name, folder / "mount") as mount:
        assert (mount.path / "class0000").is_dir()
        return {"seconds": mount.seconds}


def list_all(bench: Workbench) -> list[Row]:
    """`ls -lR` of N1M, on a fresh mount and again, against the same tree in tmpfs."""
    try:
        with tmpfs.tree(N1M) as tree:
            return _list_against(bench, lambda: {"first": _ls_seconds(tree)})
    except PeerMissing as error:
        reason = str(error)

        def missing() -> dict[str, float]:
            raise PeerMissing(reason)

        return _list_against(bench, missing)


def _list_against(bench: Workbench, peer: Callable[[], dict[str, float]]) -> list[Row]:
    dlcmd = bench.n1m

    def ours() -> dict[str, float]:
        with bench.scratch() as folder, dlcmd.mounted(N1M.name, folder / "mount") as mount:
            return {"first": _ls_seconds(mount.path), "again": _ls_seconds(mount.path)}

    rounds = alternate(bench.rounds, {OURS: ours, tmpfs.NAME: peer})
    other = rounds.of(tmpfs.NAME, "first")
    name = f"ls -lR of {N1M.name}"
    return [
        Row(name, "s", rounds.ours("first"), tmpfs.NAME, other, at_most(LS_RATIO), "a fresh mount"),
        Row(f"{name}, again", "s", rounds.ours("again"), tmpfs.NAME, other),
    ]


def _ls_seconds(folder: Path) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    start_s = time.perf_counter()
    subprocess.run(["ls", "-lR", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s


def read(bench: Workbench) -> list[Row]:
    """D4 in random order by one reader, two epochs on a fresh mount, against ratarmount."""
    source = bench.input(D4)
    with bench.scratch() as folder:
        dlcmd, archive, mountpoint = Dlcmd(folder), folder / "D4.tar", folder / "mount"
        dlcmd.seconds("put", str(source), D4.name)
        tar.pack_seconds(source, archive)

        def ours() -> dict[str, float]:
            bench.settle(dlcmd.store)
            with dlcmd.mounted(D4.name, mountpoint) as mount:
                return _epochs(bench, mount.path)

        def peer() -> dict[str, float]:
            bench.settle(folder)
            with ratarmount.mounted(archive, mountpoint) as mount:
                return _epochs(bench, mount)

        rounds = alternate(bench.rounds, {OURS: ours, ratarmount.NAME: peer})
    note = "one C reader: open, fstat, read, close; chunks and tar in the page cache"
    return [
        Row(
            f"read {D4.name} from a mount, {epoch}",
            "files/s",
            rounds.ours(epoch),
            ratarmount.NAME,
            rounds.of(ratarmount.NAME, epoch),
            at_least(READ_RATIO),
            note if epoch == EPOCHS[0] else "",
        )
        for epoch in EPOCHS
    ]


def _epochs(bench: Workbench, mount: Path) -> dict[str, float]:
    """Files per second of each epoch, in an order of its own, and all bytes checked."""
    paths, rates = D4.paths(), {}
    for number, epoch in enumerate(EPOCHS):
        order = np.random.default_rng(number).permutation(len(paths)).tolist()
        with bench.scratch() as folder:
            wanted = write_list((f"{mount}/{paths[at]}" for at in order), folder / "list")
            report = read_files(bench.reader, wanted)
        got = report.files, report.bytes, report.sum
        assert got == (D4.files, D4.bytes, D4.content_sum()), f"wrong contents were read: {got}"
        rates[epoch] = report.files / report.seconds
    return rates

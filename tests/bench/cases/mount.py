"""Benchmarks of mounting: how soon a mount is ready, the memory of its processes, and the pyfuse3
session against ratarmount."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..dlcmd import Dlcmd
from ..inputs import D4, N1M, N14M, Shape
from ..peers import ratarmount, tar
from ..reader import read_files, write_list
from ..report import Row, at_least, within
from ..samples import OURS, alternate, repeat
from ..workbench import Workbench
from .kernel import PYFUSE3

READY_S = 1
READ_RATIO = 1
KEPT_S, MADE_S = 0.5, 3
MEMORY_MB: Mapping[Shape, float] = {N1M: 120, N14M: 400}
FIRST_OWNER = 20_000  # a user ID that no other mount of the bench shows
EPOCHS = ("first epoch", "second epoch")


def ready(bench: Workbench) -> list[Row]:
    """The time from the start of `dlcmd mount` to its return, for N1M with its snapshot in the
    store."""

    def first() -> dict[str, float]:
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder, store=bench.n1m.store)  # a user without a copy of the snapshot
            return _mount_seconds(dlcmd, folder)

    def again() -> dict[str, float]:
        with bench.scratch() as folder:
            return _mount_seconds(bench.n1m, folder)

    adopted = repeat(bench.rounds, first).ours("seconds")
    again()  # makes the user's copy of the snapshot, which the timed runs then use
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


def first_byte(bench: Workbench) -> list[Row]:
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
        within(f"{name}, image kept", "s", kept, KEPT_S, most=True),
        within(f"{name}, image made anew", "s", made, MADE_S, most=True, note=other),
    ]


def memory(bench: Workbench) -> list[Row]:
    """The memory of the processes of a mount of `bench.session` that was walked: N1M, and with
    `bench.large` N14M."""
    session = bench.session_options
    rows: list[Row] = []
    for shape in (N1M, N14M) if bench.large else (N1M,):
        dlcmd, _ = bench.empty_files(shape)
        rows += _memory_rows(bench, dlcmd, shape, session)
    return rows


def _memory_rows(
    bench: Workbench, dlcmd: Dlcmd, shape: Shape, session: tuple[str, ...]
) -> list[Row]:
    def walked() -> dict[str, float]:
        with (
            bench.scratch() as folder,
            dlcmd.mounted(shape.name, folder / "mount", *session) as mount,
        ):
            nothing = write_list([], folder / "nothing")
            read_files(bench.reader, nothing, walk=mount.path)
            pss, private = mount.unmapped_bytes(mount.counts().supervisor)
            return {"PSS": pss / 1e6, "private": private / 1e6}

    rounds = repeat(1, walked)
    name = f"{bench.session} memory of the processes, {shape.name}"
    return [
        within(
            f"{name}, PSS", "MB", rounds.ours("PSS"), MEMORY_MB[shape], most=True,
            note="mounted and walked; mapped files are not counted",
        ),
        Row(f"{name}, private", "MB", rounds.ours("private")),
    ]  # fmt: skip


def read(bench: Workbench) -> list[Row]:
    """D4 in random order by one reader, two epochs on a fresh mount, against ratarmount."""
    source = bench.input(D4)
    with bench.scratch() as folder:
        dlcmd, archive, mountpoint = Dlcmd(folder), folder / "D4.tar", folder / "mount"
        dlcmd.seconds("put", str(source), D4.name)
        tar.pack_seconds(source, archive)

        def ours() -> dict[str, float]:
            bench.warm_page_cache(dlcmd.store)
            with dlcmd.mounted(D4.name, mountpoint, *PYFUSE3) as mount:
                return _epochs(bench, mount.path)

        def peer() -> dict[str, float]:
            bench.warm_page_cache(folder)
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
    """Files per second of each epoch, each in another order; all bytes are checked."""
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

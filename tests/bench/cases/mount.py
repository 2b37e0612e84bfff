"""Benchmarks of mounting: how soon a mount is ready, the memory of its processes, and the pyfuse3
session against ratarmount."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D4, N1M, N14M, Shape
from ..peers.trees import RATARMOUNT
from ..reading import read_files, write_list
from ..report import Row, against, at_least, no_more_than
from ..samples import OURS, alternate, repeat
from ..stored import stored
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
        no_more_than(name, "s", ours, READY_S, own),
        no_more_than(f"{name}, the first time", "s", adopted, READY_S, none),
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
        no_more_than(f"{name}, image kept", "s", kept, KEPT_S),
        no_more_than(f"{name}, image made anew", "s", made, MADE_S, other),
    ]


def memory(bench: Workbench) -> list[Row]:
    """The memory of the processes of a mount of `bench.session` that was walked: N1M, and with
    `bench.large` N14M."""
    rows: list[Row] = []
    for shape in MEMORY_MB if bench.large else (N1M,):
        walked = partial(_walked, bench, bench.empty_files(shape)[0], shape)
        rounds = repeat(1, walked)
        name = f"{bench.session} memory of the processes, {shape.name}"
        note = "mounted and walked; mapped files are not counted"
        rows += [
            no_more_than(f"{name}, PSS", "MB", rounds.ours("PSS"), MEMORY_MB[shape], note),
            Row(f"{name}, private", "MB", rounds.ours("private")),
        ]
    return rows


def _walked(bench: Workbench, dlcmd: Dlcmd, shape: Shape) -> dict[str, float]:
    with (
        bench.scratch() as folder,
        dlcmd.mounted(shape.name, folder / "mount", *bench.session_options) as mount,
    ):
        read_files(bench.reader, write_list([], folder / "nothing"), walk=mount.path)
        pss, private = mount.unmapped_bytes(mount.counts().supervisor)
        return {"PSS": pss / 1e6, "private": private / 1e6}


def read(bench: Workbench) -> list[Row]:
    """D4 in random order by one reader, two epochs on a fresh mount, against ratarmount."""
    with stored(bench, D4) as data:

        def epochs(side: str) -> dict[str, float]:
            orders = data.orders(side, len(EPOCHS))
            with data.opened(side, *PYFUSE3):
                rates = [bench.read_epoch(order).files_per_s for order in orders]
            return dict(zip(EPOCHS, rates, strict=True))

        sides = {side: partial(epochs, side) for side in (OURS, RATARMOUNT)}
        rounds = alternate(bench.rounds, sides)
    first, second = (f"read {D4.name} from a mount, {epoch}" for epoch in EPOCHS)
    target = {RATARMOUNT: at_least(READ_RATIO)}
    note = "one C reader: open, fstat, read, close; chunks and tar in the page cache"
    return [
        *against(rounds, first, "files/s", target, note, of=EPOCHS[0]),
        *against(rounds, second, "files/s", target, of=EPOCHS[1]),
    ]

"""Benchmark of 1 to 16 readers at once in later epochs of D4: a table, and a plot beside the
bench."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

from ..dlcmd import Dlcmd
from ..epochs import Order, files_per_s, prepared, random_order, read_epoch
from ..inputs import D4
from ..peers import ratarmount, squashfuse, tar, tmpfs
from ..plot import Plot, plot_medians
from ..report import Row
from ..samples import OURS, Side, alternate
from ..workbench import Workbench
from .kernel import ONESHOT, OVER_PYFUSE3, PYFUSE3

READERS = (1, 2, 4, 8, 16)
PEERS = (tmpfs.NAME, squashfuse.NAME, ratarmount.NAME, OVER_PYFUSE3)
SHOWN = {
    tmpfs.NAME: tmpfs.NAME,
    OURS: "DIESEL-FS, kernel session",
    OVER_PYFUSE3: OVER_PYFUSE3,
    squashfuse.NAME: squashfuse.NAME,
    ratarmount.NAME: ratarmount.NAME,
}
PLOT = Plot(
    "readers",
    "20,000 files of 4 KiB in random order, second and later epochs",
    "readers at once",
    "files read a second",
    READERS,
)


def measure(bench: Workbench) -> list[Row]:
    """The rates of an epoch that some readers share, in an order of its own, after a first
    epoch."""
    shape, source = prepared(bench, D4)
    with bench.scratch() as folder, ExitStack() as stack:
        dlcmd, mountpoint = Dlcmd(folder), folder / "mount"
        archives, images = folder / "archives", folder / "images"
        dlcmd.seconds("put", str(source), shape.name)

        @cache
        def orders(root: Path) -> list[Order]:
            return [random_order(shape, root, seed, folder) for seed in range(len(READERS) + 1)]

        def rates(root: Path) -> dict[str, float]:
            first, *others = orders(root)
            read_epoch(bench, first, walk=root)
            return {
                str(readers): files_per_s(read_epoch(bench, order, readers=readers))
                for readers, order in zip(READERS, others, strict=True)
            }

        def ours(options: tuple[str, ...]) -> dict[str, float]:
            orders(mountpoint)
            bench.warm_page_cache(dlcmd.store)
            with dlcmd.mounted(shape.name, mountpoint, *options):
                return rates(mountpoint)

        @cache
        def in_memory() -> Path:
            return stack.enter_context(tmpfs.tree(shape))

        @cache
        def image() -> Path:
            images.mkdir()
            return squashfuse.pack(source, images / "image")

        @cache
        def archive() -> Path:
            archives.mkdir()
            tar.pack_seconds(source, archives / "archive.tar")
            return archives / "archive.tar"

        def over_squashfuse() -> dict[str, float]:
            packed = image()
            bench.warm_page_cache(images)
            with squashfuse.mounted(packed, mountpoint):
                return rates(mountpoint)

        def over_ratarmount() -> dict[str, float]:
            packed = archive()
            bench.warm_page_cache(archives)
            with ratarmount.mounted(packed, mountpoint):
                return rates(mountpoint)

        sides: dict[str, Side] = {
            OURS: lambda: ours(ONESHOT),
            tmpfs.NAME: lambda: rates(in_memory()),
            squashfuse.NAME: over_squashfuse,
            ratarmount.NAME: over_ratarmount,
            OVER_PYFUSE3: lambda: ours(PYFUSE3),
        }
        rounds = alternate(bench.rounds, sides)
    plot_medians(bench, PLOT, rounds, SHOWN)
    return [
        Row(
            f"kernel {shape.name}, {readers} reader{'s' * (readers > 1)}",
            "files/s",
            rounds.ours(str(readers)),
            peer,
            rounds.of(peer, str(readers)),
        )
        for readers in READERS
        for peer in PEERS
    ]

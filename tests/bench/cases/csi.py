"""Benchmarks of the CSI driver: how soon a volume can be read after it was published, and what many
volumes at once leave. The plugin runs as a program whose mounts are processes; root only."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes.csi.plugin import Plugin, running_plugin
from tests.waiting import wait_until

from ..dlcmd import Dlcmd
from ..inputs import D4
from ..report import Row, no_more_than
from ..samples import repeat
from ..workbench import Workbench

READABLE_S = 1.5
JOINED_S = 0.3
MANY = 50
MANY_WHEN_TRIED = 6


@contextmanager
def _published(bench: Workbench) -> Iterator[tuple[Plugin, Path, dict[str, str]]]:
    """A plugin that ends idle mounts at once, a folder for targets, and a volume with D4."""
    shape = bench.shape(D4)
    with bench.scratch() as folder:
        dlcmd = Dlcmd(folder)
        dlcmd.seconds("put", str(bench.input(shape)), shape.name)
        attributes = {"dataset": shape.name, "url": dlcmd.url, "memory": "256M"}
        (folder / "targets").mkdir()
        with running_plugin(folder / "plugin", "--idle=0", f"--file-root={folder}") as plugin:
            yield plugin, folder / "targets", attributes
            plugin.wait_until_clean()


def _read_first_byte(target: Path) -> None:
    folder = next(path for path in target.iterdir() if path.is_dir())
    with next(folder.iterdir()).open("rb", buffering=0) as file:
        assert file.read(1)


def publish(bench: Workbench) -> list[Row]:
    """The time from NodePublishVolume to the first byte, of a volume that nobody has mounted here,
    and of one that shares a mount."""
    with _published(bench) as (plugin, targets, attributes):

        def seconds(name: str) -> float:
            start_s = time.perf_counter()
            plugin.kubelet.publish(targets / name, attributes)
            _read_first_byte(targets / name)
            return time.perf_counter() - start_s

        def both() -> dict[str, float]:
            found = {"first": seconds("first"), "second": seconds("second")}
            for name in ("first", "second"):
                plugin.kubelet.unpublish(targets / name)
            plugin.wait_until_clean()
            return found

        both()  # makes the node's copy of the snapshot, and the image
        rounds = repeat(bench.rounds, both)
    shares = "a second pod, which shares the mount"
    name = f"CSI: publish {D4.name}, to the first byte"
    return [
        no_more_than(name, "s", rounds.ours("first"), READABLE_S, "a new mount"),
        no_more_than(f"{name}, again", "s", rounds.ours("second"), JOINED_S, shares),
    ]


def many(bench: Workbench) -> list[Row]:
    """Fifty volumes, each with a mount of its own, published and unpublished side by side; four
    mounts start at once."""
    count = MANY if bench.divisor == 1 else MANY_WHEN_TRIED
    with _published(bench) as (plugin, targets, attributes):
        plugin.kubelet.deadline_s = 600

        def publish_one(place: Path) -> None:
            plugin.kubelet.publish(place, {**attributes, "seed": place.name})

        def run() -> dict[str, float]:
            plugin.kubelet.probe()
            before, start_s = len(plugin.descriptors()), time.perf_counter()
            places = [targets / str(number) for number in range(count)]
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(publish_one, places))
                published_s = time.perf_counter() - start_s
                assert len(plugin.roots) == count
                for place in places:
                    _read_first_byte(place)
                list(pool.map(plugin.kubelet.unpublish, places))
            wait_until(lambda: not plugin.roots and not plugin.processes(), 600.0)
            left = len(plugin.roots) + len(plugin.processes()) + len(list(targets.iterdir()))
            return {"seconds": published_s, "left": left + len(plugin.descriptors()) - before}

        rounds = repeat(1, run)
    name = f"CSI: {MANY} volumes side by side"
    what = "mounts, processes, folders, descriptors"
    return [
        Row(f"{name}, all published", "s", rounds.ours("seconds"), note="4 mounts start at once"),
        no_more_than(f"{name}, left afterwards", what, rounds.ours("left"), 0),
    ]

"""The files of a shape in each form that a side reads: in a folder on the disk, in a repository of
ours, and in the images and archives of peers, which are made when they are first read.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .control_group import ControlGroup
from .dlcmd import Dlcmd
from .inputs import Shape
from .mounts import Mount
from .peers import trees
from .reading import STOCK, Order, ReadReport, random_order, waiting_loop
from .samples import OURS
from .workbench import Workbench

EXT4 = "the disk's file system"
PLAIN = (trees.TMPFS, EXT4)
"""The sides that need no mount."""


@dataclass(frozen=True, slots=True)
class Tree:
    """All files below a folder, as a side shows them: the time of its mount command, the moment of
    its return (`time.monotonic()`), and the mount if it is ours."""

    root: Path
    mount_s: float = 0.0
    ready_s: float = 0.0
    mount: Mount | None = None

    def requests(self) -> int:
        """Requests until now (`Counts.requests`); 0 for a peer."""
        return 0 if self.mount is None else self.mount.counts().requests

    def reads(self) -> int:
        return 0 if self.mount is None else self.mount.counts().reads


class Stored:
    """A shape that was put into a repository with these options, and its other forms, in a folder
    of their own."""

    def __init__(
        self, bench: Workbench, shape: Shape, folder: Path, stack: ExitStack, *options: str
    ) -> None:
        self.bench, self.shape, self.folder = bench, shape, folder
        self.source = bench.input(shape)
        self.mountpoint = folder / "mount"
        self.dlcmd = Dlcmd(folder)
        self.dlcmd.seconds("put", *options, str(self.source), shape.name)
        self._stack = stack
        self._orders: dict[tuple[Path, int], Order] = {}

    def mount_once(self, *options: str) -> None:
        """Mount and unmount, so that this user has a copy of the snapshot, and an image if the
        session uses images."""
        with self.dlcmd.mounted(self.shape.name, self.mountpoint, *options):
            pass

    @cached_property
    def _in_memory(self) -> Path:
        return self._stack.enter_context(trees.in_memory(self.shape))

    def root(self, side: str) -> Path:
        if side == trees.TMPFS:
            return self._in_memory
        return self.source if side == EXT4 else self.mountpoint

    def orders(self, side: str, count: int) -> list[Order]:
        """Random orders of a side's files by the seeds from 0 on, written before it is mounted."""
        root = self.root(side)
        for seed in range(count):
            if (root, seed) not in self._orders:
                self._orders[root, seed] = random_order(self.shape, root, seed, self.folder)
        return [self._orders[root, seed] for seed in range(count)]

    def prepare(self, side: str, *, cold: bool = False) -> None:
        """Read a side's data into the page cache; `cold` drops all from it, snapshots too."""
        if side in PLAIN:
            return
        content = self.dlcmd.store if side == OURS else self._image(side).parent
        if cold:
            self.bench.drop_page_cache(self.folder)
        else:
            self.bench.warm_page_cache(content)

    @contextmanager
    def mounted(
        self, side: str, *options: str, group: ControlGroup | None = None
    ) -> Iterator[Tree]:
        """A side's files, from a fresh mount; `options` are of a mount of ours."""
        root = self.root(side)
        if side == OURS:
            with self.dlcmd.mounted(self.shape.name, root, *options, group=group) as mount:
                yield Tree(root, mount.seconds, mount.ready_s, mount)
        elif side in PLAIN:
            yield Tree(root)
        else:
            with trees.mounted(side, self._image(side), root) as (mount_s, ready_s):
                yield Tree(root, mount_s, ready_s)

    @contextmanager
    def opened(self, side: str, *options: str, group: ControlGroup | None = None) -> Iterator[Tree]:
        """As `mounted`, after the side's data was read into the page cache."""
        self.prepare(side)
        with self.mounted(side, *options, group=group) as tree:
            yield tree

    @contextmanager
    def reader(self, python: str, order: Order) -> Iterator[Callable[[], ReadReport]]:
        """A function that walks the mount point and reads: with the stock loop of a Python, or with
        the C reader if its name is empty."""
        if not python:
            yield lambda: self.bench.read_epoch(order, walk=self.mountpoint)
            return
        with waiting_loop(python, order, STOCK, walk=self.mountpoint) as run:
            yield run

    def _image(self, peer: str) -> Path:
        name = "image.tar" if peer == trees.RATARMOUNT else "image"
        image = self.folder / peer.rpartition(" ")[2] / name
        if not image.exists():
            image.parent.mkdir(exist_ok=True)
            trees.pack(peer, self.source, image)
        return image


@contextmanager
def stored(bench: Workbench, shape: Shape, *options: str) -> Iterator[Stored]:
    """The files of a shape, put with these options of `dlcmd put`."""
    with bench.scratch() as folder, ExitStack() as stack:
        yield Stored(bench, shape, folder, stack, *options)

"""The folders of the bench, and the shared parts of its benchmarks: inputs, the reader, a large
dataset.

Everything lies in one folder, on one disk: `inputs/`, which `--keep` keeps, and `work/`, which is
removed at the end. A benchmark takes a `scratch` folder and leaves nothing outside it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from .control_group import ControlGroup
from .dlcmd import Dlcmd, help_of_mounting
from .inputs import N1M, Shape, make, pipe, tar_stream
from .reading import READER, Order, ReadReport, compiled, read_files, write_list
from .samples import progress

NATIVE = "native"
"""The session that has its tree in the kernel."""


class SessionMissing(Exception):
    """This version of DIESEL-FS does not have the session to be measured."""


class Workbench:
    def __init__(
        self, folder: Path, rounds: int, divisor: int = 1, *, session: str = NATIVE
    ) -> None:
        """`divisor` makes inputs smaller: to try the bench, not to measure. The group `native`
        measures mounts of `session`."""
        self.folder, self.rounds, self.divisor, self.session = folder, rounds, divisor, session
        self._inputs, self._work = folder / "inputs", folder / "work"
        for each in (self._inputs, self._work):
            each.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Remove everything but the inputs."""
        shutil.rmtree(self._work, ignore_errors=True)

    def shape(self, shape: Shape) -> Shape:
        return shape if self.divisor == 1 else shape.scaled(self.divisor)

    def input(self, shape: Shape) -> Path:
        progress(f"input {shape.name}: {shape.files:,} files of {shape.file_bytes:,} bytes")
        return make(shape, self._inputs)

    def prepared(self, wanted: Shape) -> tuple[Shape, Path]:
        """The shape to measure, and the folder with its files."""
        shape = self.shape(wanted)
        return shape, self.input(shape)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the bench's disk, removed at the end."""
        folder = Path(tempfile.mkdtemp(dir=self._work))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @cached_property
    def reader(self) -> Path:
        return compiled(READER, self._work)

    def read_epoch(
        self, order: Order, *, readers: int = 1, walk: Path | None = None,
        group: ControlGroup | None = None,
    ) -> ReadReport:  # fmt: skip
        """Read files with some C readers, which walk the folder `walk` first, and which run in
        `group` if there is one. Wrong contents are an error."""
        prefix = () if group is None else group.prefix
        report = read_files(self.reader, order.list_file, readers=readers, walk=walk, prefix=prefix)
        order.check(report, with_sum=True, walked=walk is not None)
        return report

    def warm_page_cache(self, *folders: Path) -> None:
        """Prepare a timed run: write earlier runs' dirty pages to the disk, and read all of
        `folders` into the page cache, since the kernel may have reclaimed idle pages."""
        os.sync()
        with self.scratch() as scratch:
            paths = (path for folder in folders for path in _files(folder))
            read_files(self.reader, write_list(paths, scratch / "list"))

    def drop_page_cache(self, folder: Path) -> None:
        """Drop the contents of a folder's files from the page cache; their inodes stay."""
        os.sync()  # otherwise dirty pages would stay
        for path in filter(os.path.isfile, _files(folder)):  # a socket cannot be opened
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    @cached_property
    def session_options(self) -> tuple[str, str]:
        """The options of a mount of `session`. Raises SessionMissing if this version has no such
        session."""
        if f"|{self.session}" not in help_of_mounting():
            raise SessionMissing(f"this version has no session {self.session}")
        return "--session", self.session

    @property
    def n1m(self) -> Dlcmd:
        """A repository that holds N1M, put once per run."""
        return self._n1m[0]

    @property
    def n1m_put_seconds(self) -> float:
        """The time that `dlcmd put --tar -` of N1M took."""
        return self._n1m[1]

    @cached_property
    def _n1m(self) -> tuple[Dlcmd, float]:
        shape = self.shape(N1M)
        progress(f"putting {shape.name} from a tar: {shape.files:,} empty files")
        dlcmd = Dlcmd(self._work / shape.name)
        start_s = time.perf_counter()
        command = dlcmd.command("put", "--tar", "-", shape.name)
        if code := pipe(tar_stream(shape), command, **dlcmd.environment):
            raise subprocess.CalledProcessError(code, command)
        return dlcmd, time.perf_counter() - start_s


def _files(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names)

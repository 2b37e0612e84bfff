"""Our side: the command line as a user runs it, with a repository and caches of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .mounts import is_mounted

PROGRAM = Path(sys.executable).parent / "dlcmd"
TREE = Path(__file__).resolve().parents[2]
DEADLINE_S = 900.0  # for what takes a minute: a hang must not take the bench's whole hour


class Dlcmd:
    """`dlcmd` of a user whose caches and logs lie in `folder`, and so the store unless given."""

    def __init__(self, folder: Path, *, store: Path | None = None) -> None:
        self.store = store or folder / "store"
        self.url = self.store.as_uri()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("DIESEL_")}
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        self.environment["DIESEL_URL"] = self.url
        self.environment["PYTHONPATH"] = str(TREE)  # for the probes

    def command(self, *arguments: str) -> list[str]:
        """The words of a command."""
        return [str(PROGRAM), "-q", *arguments]

    def seconds(self, *arguments: str) -> float:
        """Runs a command, and says how long it took. Raises CalledProcessError."""
        start_s = time.perf_counter()
        self._run(*arguments)
        return time.perf_counter() - start_s

    def stored_bytes(self) -> int:
        """How much lies in the repository."""
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())

    @contextmanager
    def mounted(self, dataset: str, mountpoint: Path) -> Iterator["Mount"]:
        """The dataset at a mount point, which is made; unmounted at the end, come what may."""
        mountpoint.mkdir(exist_ok=True)
        try:
            yield Mount(mountpoint, self.seconds("mount", dataset, str(mountpoint)))
        finally:
            if is_mounted(mountpoint):
                try:
                    self._run("umount", str(mountpoint))
                except subprocess.CalledProcessError:
                    with suppress(subprocess.CalledProcessError):
                        self._run("umount", "--lazy", str(mountpoint))
                    raise

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            self.command(*arguments),
            env=self.environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=DEADLINE_S,
        )


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount, and how long the command that made it took."""

    path: Path
    seconds: float

"""Runs `dlcmd` as our side of a benchmark, with a repository and caches of its own."""

import compileall
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .control_group import ControlGroup
from .mounts import Mount, is_mounted
from .samples import progress

PROGRAM = Path(sys.executable).parent / "dlcmd"
TREE = Path(__file__).resolve().parents[2]
LOG_CHARS = 2000
DEADLINE_S = 900.0  # commands take a minute at most; a hang must not use up the bench's hour


@cache
def compile_program() -> None:
    """Write the program's bytecode, as an installation does. If Python does not write it (a common
    setting in containers), every command would compile the modules again."""
    for package in ("diesel_fs", "cli/dlcmd"):
        compileall.compile_dir(TREE / package, quiet=2)


@cache
def help_of_mounting() -> str:
    command = [str(PROGRAM), "mount", "--help"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def last_line(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> str:
    """The last line that a program prints, which is JSON. Raises CalledProcessError."""
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=deadline_s
    )
    return done.stdout.splitlines()[-1]


class Dlcmd:
    """`dlcmd` of a user with caches and logs in `folder`. The store is there too, unless `store` is
    given."""

    def __init__(self, folder: Path, *, store: Path | None = None) -> None:
        compile_program()
        self.store = store or folder / "store"
        self.url = self.store.as_uri()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("DIESEL_")}
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        self.environment["DIESEL_URL"] = self.url
        self.environment["PYTHONPATH"] = str(TREE)  # for the probes

    @property
    def users_environment(self) -> dict[str, str]:
        """The environment of a user's program, which does not import this tree."""
        return {name: value for name, value in self.environment.items() if name != "PYTHONPATH"}

    def command(self, *arguments: str) -> list[str]:
        return [str(PROGRAM), "-q", *arguments]

    def seconds(self, *arguments: str) -> float:
        """Run a command; the seconds that it took. Raises CalledProcessError."""
        start_s = time.perf_counter()
        self._run(*arguments)
        return time.perf_counter() - start_s

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())

    def output(self, *arguments: str) -> bytes:
        return self._run(*arguments, kept=subprocess.PIPE).stdout

    @contextmanager
    def mounted(
        self, dataset: str, mountpoint: Path, *options: str, group: ControlGroup | None = None
    ) -> Iterator[Mount]:
        """Mount the dataset at a mount point, which is made, and unmount it at the end in any case.

        With a `group`, all processes of the mount run in this control group. After a failure, the
        ends of the mounts' logs are printed, since the folder with them is soon removed.
        """
        mountpoint.mkdir(exist_ok=True)
        prefix = () if group is None else group.prefix
        try:
            start_s = time.monotonic()
            self._run("mount", *options, dataset, str(mountpoint), prefix=prefix)
            ready_s = time.monotonic()
            yield Mount(mountpoint, ready_s - start_s, ready_s)
        except Exception:
            for log in Path(self.environment["XDG_STATE_HOME"]).rglob("*.log"):
                progress(f"{log.name} ends so:\n{log.read_text(errors='replace')[-LOG_CHARS:]}")
            raise
        finally:
            if is_mounted(mountpoint):
                try:
                    self._run("umount", str(mountpoint))
                except subprocess.CalledProcessError:
                    with suppress(subprocess.CalledProcessError):
                        self._run("umount", "--lazy", str(mountpoint))
                    raise

    def _run(
        self, *arguments: str, prefix: Sequence[str] = (), kept: int = subprocess.DEVNULL
    ) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [*prefix, *self.command(*arguments)],
            env=self.environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=kept,
            timeout=DEADLINE_S,
        )

"""Runs training scripts of other people's libraries, with and without `dlcmd run`.

`make test-clients` makes the environment `.venv/clients`, which has these libraries, and runs the
tests of this folder; `make test` leaves them out. The tests themselves run in `.venv`, and start
the scripts (`scripts/`) with the Python of `.venv/clients`. README.md has more.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diesel_fs.mounts.plans.control import Control
from tests.cli.conftest import Dlcmd
from tests.cli.conftest import dlcmd as dlcmd

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[2] / ".venv" / "clients" / "bin" / "python"
CLASSES, TRAIN_PER_CLASS, VAL_PER_CLASS = 10, 50, 15
TRAIN, VAL = CLASSES * TRAIN_PER_CLASS, CLASSES * VAL_PER_CLASS + 1
FILES = TRAIN + VAL
DEADLINE_S = 280


@dataclass(slots=True)
class Epoch:
    """The samples that a script got in one epoch of one loader, and the mount's requests
    meanwhile."""

    name: str
    samples: dict[int, object]
    """The samples in their order, by rank."""
    reads: int
    """READ requests since the epoch before."""


@dataclass(slots=True)
class Training:
    epochs: list[Epoch]
    report: str
    """The stderr of the script and of `dlcmd run`."""

    @property
    def samples(self) -> dict[str, dict[int, object]]:
        return {each.name: each.samples for each in self.epochs}

    @property
    def reads(self) -> dict[str, int]:
        return {each.name: each.reads for each in self.epochs}


class _Epochs:
    """Listens to the scripts (`scripts/seen.py`). A context manager."""

    def __init__(self, mount: Path, path: Path) -> None:
        self._mount = mount
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._before = self._reads()
        self.found: list[Epoch] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "_Epochs":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            with connected, connected.makefile("rb") as stream:
                self._add(json.loads(stream.readline()))
                connected.sendall(b"\n")

    def _add(self, report: dict[str, object]) -> None:
        name, rank = str(report["epoch"]), int(str(report["rank"]))
        known = {each.name: each for each in self.found}  # a rank may be behind the other
        if name not in known:
            self.found.append(Epoch(name, {}, 0))
        epoch, reads = known.get(name, self.found[-1]), self._reads()
        epoch.samples[rank] = report["samples"]
        epoch.reads += reads - self._before
        self._before = reads

    def _reads(self) -> int:
        with Control.connect(str(self._mount)) as control:
            requests = control.stats()["requests"]
        assert isinstance(requests, dict)
        return int(str(requests.get("read", 0)))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of JPEGs with `train/` and `val/`, each with a folder for each class."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make test-clients`")
    folder, chance = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    for part, count in ("train", TRAIN), ("val", VAL):
        for number in range(count):
            path = folder / part / f"class{number % CLASSES}" / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            small = chance.integers(0, 256, (20, 25, 3), np.uint8)
            size = int(chance.integers(180, 400)), int(chance.integers(150, 300))
            Image.fromarray(small).resize(size).save(path, quality=85)
    return folder


class Client:
    """Runs training scripts on a mount of the images."""

    def __init__(self, dlcmd: Dlcmd, images: Path, folder: Path) -> None:
        self._dlcmd, self._folder = dlcmd, folder
        self.mount = folder / "mnt"
        dlcmd("put", "--chunk-size", "128K", images, "pets")

    def train(
        self, *command: str | Path, joined: bool, memory: str = "256M", flags: Sequence[str] = ()
    ) -> Training:
        self._dlcmd("mount", "--memory", memory, "pets", self.mount)
        seen = self._folder / "seen"
        try:
            with _Epochs(self.mount, seen) as epochs:
                ended = subprocess.run(
                    [*(self._run(*flags) if joined else ()), *map(str, command)],
                    cwd=FOLDER, env=self._environment(seen), text=True,
                    capture_output=True, timeout=DEADLINE_S, check=False,
                )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            return Training(epochs.found, ended.stderr)
        finally:
            seen.unlink(missing_ok=True)
            self._dlcmd("umount", "--force", self.mount)

    def _run(self, *flags: str) -> Sequence[str]:
        """The installed program; a PYTHONPATH with our packages would reach the script, too."""
        return [str(Path(sys.executable).with_name("dlcmd")), "run", *flags, "--"]

    def _environment(self, seen: Path) -> dict[str, str]:
        home = self._folder / "home"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        bins = f"{PYTHON.parent}{os.pathsep}{environment['PATH']}"
        return {
            **environment, "SEEN": str(seen), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "PATH": bins,
        }  # fmt: skip


@pytest.fixture
def client(dlcmd: Dlcmd, images: Path, tmp_path: Path) -> Client:
    return Client(dlcmd, images, tmp_path)

"""Facts about mounts, named folders, and a tried mount.

This process touches no mount: `mounts/mountpoints/mountpoint.py` queries each in a child with a
deadline.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from diesel_fs.cache.disk.listing import cached_datasets
from diesel_fs.cache.disk.marker import foreign_in, is_cache_folder
from diesel_fs.errors import BusyError, DeadlineError, DieselError, NoSuchDataset, PermissionDenied
from diesel_fs.format.object_names import STORE_MARKER
from diesel_fs.mounts import stats, umount
from diesel_fs.mounts.mountpoints.mountpoint import (
    DatasetMount,
    dataset_mounts,
    is_alive,
    mounted_at,
)
from diesel_fs.repository.interface import Repository
from diesel_fs.system.daemons import minimal_environment
from diesel_fs.system.mountinfo import file_system_of, mounts

from .checks import (
    CachedUse,
    CurrentVersion,
    MountFacts,
    PlaceFacts,
    behind_finding,
    mount_findings,
    place_findings,
    session_finding,
)
from .findings import Finding, State
from .machine import ownership_error, write_error
from .probes import Emit, Probe
from .trial import MOUNTPOINT

ANSWER_S = 4.0
"""The child process that queries a mount takes a second or two to start on busy processors."""

MOUNTS_MAX = 64
"""Each mount takes a child process."""

_CURE_OF_MOUNT = "`dlcmd umount --force DIR` ends a mount that hangs"


def all_mounts() -> list[DatasetMount]:
    return dataset_mounts(mounts())[:MOUNTS_MAX]


def mount_facts(found: DatasetMount) -> MountFacts:
    """Takes at most twice `ANSWER_S`."""
    try:
        if not is_alive(found.path, deadline_s=ANSWER_S):
            return MountFacts(found.path, found.source, "dead")
        figures = stats(found.path, deadline_s=ANSWER_S)
    except DeadlineError:
        return MountFacts(found.path, found.source, "hung")
    except PermissionDenied:
        return MountFacts(found.path, found.source, "closed")
    except DieselError:  # it has just ended, or is about to
        return MountFacts(found.path, found.source, "alive")
    return MountFacts(found.path, found.source, "alive", figures)


def mount_probe(
    found: DatasetMount, open_repository: Callable[[], Repository] | None, *, is_named: bool
) -> Probe:
    """Compares the mount with the repository if `open_repository` is given. Faults count as
    warnings unless the user has named the mount."""

    def work(emit: Emit) -> None:
        facts = mount_facts(found)
        for finding in mount_findings(facts):
            emit(finding)
        if facts.stats is None or open_repository is None:
            return
        # The repository's own check finds its faults
        with suppress(DieselError), open_repository() as repository:
            try:
                info = repository.dataset(str(facts.stats["dataset"]))
            except NoSuchDataset:
                current = None
            else:
                current = CurrentVersion(str(info.identity), repository.newest_known(info))
            if behind := behind_finding(facts, current):
                emit(behind)

    worst: State = "fault" if is_named else "warning"
    return Probe("mount", f"the mount on {found.path}", work, _CURE_OF_MOUNT, worst=worst)


def place_probe(path: Path) -> Probe:
    def work(emit: Emit) -> None:
        for finding in place_findings(place_facts(path)):
            emit(finding)

    cure = "check what is mounted there (`findmnt`), and its server"
    return Probe("place", f"the folder {path}", work, cure)


def place_facts(path: Path) -> PlaceFacts:
    """The disk of a missing folder is that of the nearest folder above."""
    text = str(path)
    if path.exists() and not path.is_dir():
        return PlaceFacts(text, is_folder=False)
    above = path
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        free, system = os.statvfs(above), file_system_of(above)
        content = foreign_in(path) if path.exists() else ""
    except OSError as error:
        return PlaceFacts(text, path.exists(), error=f"it cannot be used: {error.strerror}")
    is_cache = is_cache_folder(path)
    problem = ""
    if above != path and (reason := write_error(above)):
        problem = f"it does not exist, and cannot be made in {above}: {reason}"
    elif above == path and os.geteuid() and (reason := write_error(path)):
        problem = f"nothing can be mounted on it or written to it: {reason}"
    return PlaceFacts(
        text,
        path.exists(),
        is_cache=is_cache,
        is_store=(path / STORE_MARKER).is_file(),
        content=content,
        error=problem,
        owner_error=ownership_error(path) if path.exists() else "",
        free_bytes=free.f_bavail * free.f_frsize,
        total_bytes=free.f_blocks * free.f_frsize,
        kind=system.kind,
        is_network=system.is_network,
        datasets=_cached(path) if is_cache else (),
    )


def _cached(path: Path) -> list[CachedUse]:
    now_s = time.time()
    with suppress(OSError, BusyError):
        return [
            CachedUse(each.folder, each.bytes, now_s - each.used_s, each.is_pinned)
            for each in cached_datasets(path)
        ]
    return []


# A mount that is tried


class Trial:
    """`trial.py` mounts in a temporary folder. The end of the `with` block removes the mount and
    the folder."""

    def __init__(self) -> None:
        self._folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="diesel-doctor-")))
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def mountpoint(self) -> str:
        return str(self._folder / MOUNTPOINT)

    def work(self, emit: Emit) -> None:
        own = {f"XDG_{name}": str(self._folder / name) for name in _FOLDERS}
        (self._folder / "XDG_RUNTIME_DIR").mkdir(mode=0o700)
        own["XDG_RUNTIME_DIR"] = str(self._folder / "XDG_RUNTIME_DIR")
        own["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dlcmd.doctor.trial", str(self._folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**minimal_environment(), **own},
            start_new_session=True,
        )  # fmt: skip
        out, err = self._child.communicate()
        emit(_trial_finding(out, err))

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        with suppress(DieselError):
            while mounted_at(self.mountpoint) is not None:
                umount(self.mountpoint, force=True)
        shutil.rmtree(self._folder, ignore_errors=True)


_FOLDERS = ("CACHE_HOME", "CONFIG_HOME", "DATA_HOME", "STATE_HOME")


def _trial_finding(out: bytes, err: bytes) -> Finding:
    try:
        answer = json.loads(out)
    except ValueError:
        answer = {"error": (err.decode(errors="replace").splitlines() or ["it ended at once"])[-1]}
    match answer:
        case {"session": str(session), "notes": list(notes), "seconds": float(seconds)}:
            return session_finding(session, [str(each) for each in notes], seconds)
        case {"error": str(error), **rest}:
            cure = str(rest.get("advice") or "see `dmesg`, and `dlcmd mount -f DATASET DIR`")
            return Finding("session", "fault", f"a mount was tried, and failed: {error}", cure)
    return Finding("session", "fault", "a mount was tried, without an answer", "see `dmesg`")


def mount_probes(
    found: Iterable[DatasetMount],
    open_repository: Callable[[], Repository] | None = None,
    *,
    is_named: bool = False,
) -> list[Probe]:
    return [mount_probe(each, open_repository, is_named=is_named) for each in found]

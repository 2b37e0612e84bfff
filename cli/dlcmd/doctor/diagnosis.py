"""Runs all checks of `dlcmd doctor`: of this machine, its mounts, and a repository or folder."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from diesel_fs.errors import DieselError, NoSpaceError
from diesel_fs.mounts.mountpoints.mountpoint import DatasetMount
from diesel_fs.repository.interface import Repository

from ..args.options import global_flags
from .checks import expected_session
from .findings import Finding
from .machine import folder_probes, fuse_facts, machine_findings
from .places import Trial, all_mounts, mount_probes, place_probe
from .probes import Probe, failed, run_probes
from .stores import StoreQuestion, open_for_reading, store_probe
from .trial import LIMIT_S as TRIAL_LIMIT_S


def diagnose(target: str | None, *, quick: bool = False, writes: bool = False) -> list[Finding]:
    """`target` is the URL of a repository (instead of the configured one), or a mount or folder to
    check, too. `quick` tries no mount and measures no bandwidth. `writes` tries to write to the
    repository. Each DieselError becomes a finding."""
    findings: list[Finding] = []
    probes: list[Probe] = []
    is_url = target is not None and "://" in target
    open_repository: Callable[[], Repository] | None = None
    if is_url:
        global_flags().url = target
    try:
        settings = global_flags().settings()
        question = StoreQuestion(settings, bool(settings.url), measures=not quick, writes=writes)
        probes.append(store_probe(question))
        open_repository = partial(open_for_reading, settings)
    except DieselError as error:
        findings.append(failed("settings", error, "correct the options, or the configuration file"))
    probes += _place_probes(target if not is_url else None, open_repository)
    try:
        probes += folder_probes()
    except DieselError as error:
        findings.append(failed("settings", error))
    fuse = fuse_facts()
    with ExitStack() as stack:
        machine = list(machine_findings(fuse))
        findings += machine
        may_mount = all(each.state != "fault" for each in machine if each.check.startswith("fuse."))
        if may_mount and quick:
            findings.append(expected_session(fuse))
        elif may_mount:
            try:
                trial = stack.enter_context(Trial())
            except OSError as error:
                no_room = NoSpaceError(f"no mount can be tried: {error.strerror}")
                findings.append(failed("session", no_room, "name another folder in TMPDIR"))
            else:
                cure = "see `dmesg`; `dlcmd mount -f DATASET DIR` shows how far it comes"
                what = "a mount that was tried"
                probes.append(Probe("session", what, trial.work, cure, TRIAL_LIMIT_S))
        return findings + run_probes(probes)


def _place_probes(
    target: str | None, open_repository: Callable[[], Repository] | None
) -> list[Probe]:
    """Only the mount that `target` names is compared with the repository."""
    found: list[DatasetMount] = []
    with suppress(OSError):
        found = all_mounts()
    if target is None:
        return mount_probes(found)
    path = os.path.abspath(target)
    named = _holding(path, found)
    if not named and os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        named = _holding(path, found)
    others = [each for each in found if each not in named]
    probes = mount_probes(others)
    if named:
        return mount_probes(named, open_repository, is_named=True) + probes
    return [place_probe(Path(path)), *probes]


def _holding(path: str, found: Sequence[DatasetMount]) -> list[DatasetMount]:
    """Compares only texts: a request to a mount may hang."""
    return [each for each in found if f"{path}/".startswith(each.path.rstrip("/") + "/")]

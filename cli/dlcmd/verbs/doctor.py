"""The verb `doctor`: checks what a job needs here, and says what to do about what is missing."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import click

from diesel_fs.errors import DieselError, NoSpaceError, PartialError
from diesel_fs.mounts.mountpoint import DatasetMount
from diesel_fs.names import shown
from diesel_fs.repository.interface import Repository
from diesel_fs.settings import Settings

from ..args.options import argument, global_flags, option, verb
from ..doctor.checks import expected_session
from ..doctor.findings import Finding, counts, finding_lines, in_order, summary
from ..doctor.machine import folder_probes, fuse_facts, machine_findings
from ..doctor.places import Trial, all_mounts, mount_probes, place_probe
from ..doctor.probes import Probe, failed, run_probes
from ..doctor.stores import StoreQuestion, open_for_reading, store_probe
from ..doctor.trial import LIMIT_S as TRIAL_LIMIT_S
from ..show.output import is_terminal, print_json, print_line, write_stdout

_COLOURS = {"fault": "red", "warning": "yellow", "ok": "green"}


@verb("doctor")
@argument("target", metavar="[URL|DIR]", required=False)
@option(
    "--quick", is_flag=True, help="Leave out the mount that is tried, and the measured bandwidth."
)
@option(
    "--write", "writes", is_flag=True,
    help="Try also whether this user may write to the repository. What is written is removed.",
)  # fmt: skip
def doctor(target: str | None, quick: bool, writes: bool) -> None:
    """Check what a training job needs here, and say what to do about each fault.

    It checks this machine (FUSE, memory, open files, disks), the mounts of datasets on it, and the
    repository of URL, --url or DIESEL_URL. DIR is a mount, which it then compares with the
    repository, or a folder to mount on or to keep a cache in. It tries a mount in a temporary
    folder.

    The worst comes first. The exit code is 0 only if there is no fault, so that a job would run
    well; with warnings it is 0, too. A fault of a mount is a warning, unless you ask about it. It
    takes about 15 seconds at most, even where a store or a mount hangs, and leaves nothing behind.

    \b
    Examples:
      dlcmd doctor
      dlcmd doctor 's3://bucket/prefix?meta=redis://host'
      dlcmd doctor /mnt/pets
    """
    findings = diagnose(target, quick=quick, writes=writes)
    if global_flags().json:
        count = counts(findings)
        print_json(
            {
                "runs_well": not count["fault"],
                "faults": count["fault"],
                "warnings": count["warning"],
                "findings": [each.described() for each in in_order(findings)],
            }
        )
    elif not global_flags().quiet:
        for line in finding_lines(findings):
            write_stdout([_coloured(shown(os.fsencode(line))).encode() + b"\n"])
    if counts(findings)["fault"]:
        raise PartialError(summary(findings))
    print_line(summary(findings))


def _coloured(line: str) -> str:
    """A line with its state in colour, on a terminal."""
    state = line.partition(" ")[0]
    if not is_terminal() or state not in _COLOURS:
        return line
    return click.style(state, fg=_COLOURS[state]) + line[len(state) :]


def diagnose(target: str | None, *, quick: bool = False, writes: bool = False) -> list[Finding]:
    """All findings about this machine, its mounts, and the repository or folder that is named.
    Never raises DieselError: that is a finding, too."""
    findings: list[Finding] = []
    probes: list[Probe] = []
    is_url = target is not None and "://" in target
    open_repository: Callable[[], Repository] | None = None
    if is_url:
        global_flags().url = target
    try:
        settings = global_flags().settings()
        probes.append(store_probe(_question(settings, measures=not quick, writes=writes)))
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


def _question(settings: Settings, *, measures: bool, writes: bool) -> StoreQuestion:
    return StoreQuestion(settings, bool(settings.url), measures, writes)


def _place_probes(
    target: str | None, open_repository: Callable[[], Repository] | None
) -> list[Probe]:
    """The mounts of datasets on this machine, and the folder that is named if it is none of them.
    That mount alone is compared with the repository."""
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
        return mount_probes(named, open_repository, is_asked=True) + probes
    return [place_probe(Path(path)), *probes]


def _holding(path: str, found: Sequence[DatasetMount]) -> list[DatasetMount]:
    """The mounts in which a path lies, by its text: no mount is asked, as one may hang."""
    return [each for each in found if f"{path}/".startswith(each.path.rstrip("/") + "/")]

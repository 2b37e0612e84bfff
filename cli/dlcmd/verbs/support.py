"""The verb `support`: packs what helps others to find a fault into one archive, without secrets."""

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import click

from diesel_fs.errors import ConflictError, DieselError, NotFoundError, UsageError
from diesel_fs.system.atomic_file import atomic_file, write_error

from ..args.options import argument, file_path, global_flags, option, verb
from ..doctor.archive import Member, members, packed
from ..doctor.checks import MountFacts
from ..doctor.places import all_mounts, mount_facts
from ..doctor.redaction import Redactor, known_secrets
from ..show.output import bytes_text, print_json, print_line, print_note
from .doctor import diagnose

MOUNTS_ASKED = 16
"""How many mounts are asked at once: each by a child process."""

ENDINGS = (".tar.gz", ".tgz")


@verb("support")
@argument("file", type=file_path, metavar="FILE.tar.gz")
@option("--yes", is_flag=True, help="Write the archive without a question.")
@option("-n", "--dry-run", is_flag=True, help="Only list what the archive would contain.")
@option(
    "--log", "logs", type=file_path, multiple=True, metavar="FILE",
    help="Pack the end of this log, too: of a server, or of a mount with --log-file. Repeatable.",
)  # fmt: skip
def support(file: Path, yes: bool, dry_run: bool, logs: tuple[Path, ...]) -> None:
    """Pack versions, settings, statistics and logs into one archive for whoever helps you.

    What it contains is listed. It is written when you say so, on a terminal or by --yes. Only you
    may read it, and a file that exists is never replaced. Keys and passwords, and what looks like
    one, are replaced by `***`. Names of datasets, folders and hosts stay.

    \b
    Examples:
      dlcmd support -n help.tar.gz
      dlcmd support --yes --log /var/log/diesel-server.log help.tar.gz
    """
    _check_file(file)
    for log in logs:
        _check_log(log)
    try:
        settings = global_flags().settings()
    except DieselError:  # the findings say why
        settings = None
    findings = diagnose(None)
    mounts: list[MountFacts] = []
    # Those that hang are waited for at once. An archive without mounts (no /proc, or no process can
    # be started) is better than none.
    with suppress(OSError, RuntimeError), ThreadPoolExecutor(MOUNTS_ASKED) as threads:
        mounts += threads.map(mount_facts, all_mounts())
    files = members(settings, findings, mounts, logs, Redactor(known_secrets(settings)))
    if dry_run or not yes:
        _print_list(files)
    if dry_run:
        _print_json(file, files, 0)
        return
    if not yes and not _is_confirmed(file):
        print_note("nothing has been written")
        return
    content = packed(files)
    try:
        with atomic_file(file, mode=0o600) as handle:
            handle.write(content)
    except OSError as error:
        raise write_error(file, error) from error
    if yes:  # not before: whoever reads the list may end, and would end this with it
        _print_list(files)
    print_line(f"wrote {file} ({bytes_text(len(content))}); look into it before you send it")
    _print_json(file, files, len(content))


def _print_list(files: list[Member]) -> None:
    for member in files:
        print_line(f"{bytes_text(len(member.content)):>9}  {member.name}")


def _print_json(file: Path, files: list[Member], size: int) -> None:
    """Print what the archive has, with --json. `size` is 0 where it was not written."""
    if global_flags().json:
        described = [{"name": each.name, "bytes": len(each.content)} for each in files]
        print_json({"file": str(file), "bytes": size, "members": described})


def _check_file(file: Path) -> None:
    """Raises UsageError for another name, ConflictError for a file that exists."""
    if not file.name.endswith(ENDINGS):
        raise UsageError(f"{file} does not end in .tar.gz", advice="name it help.tar.gz, say")
    if os.path.lexists(file):
        raise ConflictError(f"{file} exists already", advice="name a file that does not exist")


def _check_log(log: Path) -> None:
    """Raises NotFoundError, UsageError. (A fifo would never end.)"""
    try:
        is_file = stat.S_ISREG(log.stat().st_mode)
    except OSError as error:
        raise NotFoundError(f"cannot read the log {log}: {error.strerror}") from error
    if not is_file:
        raise UsageError(f"{log} is not a regular file")


def _is_confirmed(file: Path) -> bool:
    """Whether the user says yes, on a terminal. Raises UsageError where nobody can be asked."""
    if global_flags().json or not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(f"this would write {file}", advice="confirm it with --yes")
    return click.confirm(f"write {file}?", err=True)

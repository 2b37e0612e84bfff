"""The verb `doctor`."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from diesel_fs.errors import PartialError, UsageError
from diesel_fs.names import shown

from ..args.options import argument, file_path, global_flags, option, verb
from ..doctor.bundle import Bundle
from ..doctor.diagnosis import diagnose
from ..doctor.findings import Finding, counts, finding_lines, in_order, summary
from ..doctor.speed import speed_findings
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
@option(
    "--speed", is_flag=True,
    help="Measure also how fast this machine puts, lists and reads 10,000 made-up files of 4 KiB.",
)  # fmt: skip
@option(
    "--bundle", type=file_path, metavar="FILE.tar.gz",
    help="Pack the findings, versions, settings, statistics and logs into this archive, without"
    " secrets, for whoever helps you.",
)  # fmt: skip
@option("--yes", is_flag=True, help="With --bundle: write the archive without a question.")
@option(
    "-n", "--dry-run", is_flag=True,
    help="With --bundle: only list what the archive would contain.",
)  # fmt: skip
@option(
    "--log", "logs", type=file_path, multiple=True, metavar="FILE",
    help="With --bundle: pack the end of this log, too: of a server, or of a mount with --log-file."
    " Repeatable.",
)  # fmt: skip
def doctor(
    target: str | None, quick: bool, writes: bool, speed: bool, bundle: Path | None, yes: bool,
    dry_run: bool, logs: tuple[Path, ...],
) -> None:  # fmt: skip
    """Check what a training job needs here, with advice for each fault.

    It checks this machine (FUSE, memory, open files, disks), its mounts, and the repository of URL,
    --url or DIESEL_URL, and tries a mount in a temporary folder. DIR is a mount, which is compared
    with the repository, or a folder for a mount or a cache.

    The worst comes first. The exit code is 0 if there is no fault, even with warnings: a job would
    run well. A fault of a mount is a warning, unless you name the mount. It takes about 15 seconds
    at most, even if a store or a mount hangs, and leaves nothing behind. --speed takes some seconds
    more, and uses a folder in TMPDIR.

    With --bundle, the findings go into an archive instead. Its contents are listed, and it is
    written when you confirm it, on a terminal or by --yes. Only you may read it, and an existing
    file is never replaced. Keys, passwords, and texts that look like one are replaced by `***`.
    Names of datasets, folders and hosts stay.

    \b
    Examples:
      dlcmd doctor
      dlcmd doctor 's3://bucket/prefix?meta=redis://host'
      dlcmd doctor /mnt/pets
      dlcmd doctor --speed
      dlcmd doctor --bundle help.tar.gz --log /var/log/diesel-server.log
    """
    archive = None if bundle is None else Bundle(bundle, logs, yes=yes, dry_run=dry_run)
    if archive is not None:
        archive.check()
    elif yes or dry_run or logs:
        raise UsageError(
            "--yes, --dry-run and --log are about an archive", advice="give --bundle FILE.tar.gz"
        )
    findings = diagnose(target, quick=quick, writes=writes)
    if speed:
        findings += speed_findings()
    if archive is not None:
        archive.write(findings)
        return
    _print(findings)
    if counts(findings)["fault"]:
        raise PartialError(summary(findings))
    print_line(summary(findings))


def _print(findings: Sequence[Finding]) -> None:
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


def _coloured(line: str) -> str:
    state = line.partition(" ")[0]
    if not is_terminal() or state not in _COLOURS:
        return line
    return click.style(state, fg=_COLOURS[state]) + line[len(state) :]

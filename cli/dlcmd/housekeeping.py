"""`dlcmd purge`, also named `compact`."""

import re
from collections.abc import Callable
from typing import ParamSpec

import click

from diesel_fs.errors import UsageError
from diesel_fs.repository import purge as housekeeping
from diesel_fs.repository.purge import PurgeOptions, PurgeReport
from diesel_fs.repository.versions import GRACE_S

from .addresses import open_repository_from_flags
from .options import dataset, duration, global_flags, verb
from .output import bytes_text, count_text, say, say_json
from .progress import Progress, shown_progress

_PERCENT = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))?%?", re.ASCII)
_WHOLE_PPM = 1_000_000


def share(text: str) -> int:
    """A share in percent, as millionths. Raises UsageError."""
    match = _PERCENT.fullmatch(text)
    found = int(match[1]) * 10_000 + int((match[2] or "").ljust(4, "0")) if match else -1
    if not 0 <= found <= _WHOLE_PPM:
        raise UsageError(f"bad share {text!r}", advice="write it as 5% or 2.5%")
    return found


_P = ParamSpec("_P")


def _parameters(function: Callable[_P, None]) -> Callable[_P, None]:
    """What both names of the verb take."""
    for parameter in reversed(_PARAMETERS):
        function = parameter(function)
    return function


_PARAMETERS = (
    click.argument("name", type=dataset, metavar="DATASET"),
    click.option(
        "--max-unused",
        type=share,
        metavar="PERCENT",
        default="5%",
        show_default=True,
        help="Rewrite chunks of which more than that is unused.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(0),
        metavar="N",
        help="Keep the last N versions, from now on.  [default: as before; at first 0]",
    ),
    click.option(
        "--grace",
        type=duration,
        metavar="TIME",
        help=f"Keep what may still be read for so long: 0, 90m, 7d.  [default: {GRACE_S // 3600}h]",
    ),
    click.option(
        "-n", "--dry-run", is_flag=True, help="Change nothing; say how much there is to do."
    ),
)


@verb("purge")
@_parameters
def purge(name: str, max_unused: int, keep: int | None, grace: int | None, dry_run: bool) -> None:
    """Give back the space of what has been replaced or deleted.

    Chunks with unused parts are rewritten, small ones merged. The old ones go once nobody can be
    using them any more: not before the grace period is over, nor while a version that is kept or a
    mount needs them. So the space comes back with a later purge; with --grace 0 at once, and
    readers that could not say that they are there lose what they read.

    \b
    Examples:
      dlcmd purge pets
      dlcmd purge -n pets
      dlcmd purge --keep 3 --grace 7d pets
    """
    _purge(name, max_unused, keep, grace, dry_run=dry_run)


@verb("compact")
@_parameters
def compact(name: str, max_unused: int, keep: int | None, grace: int | None, dry_run: bool) -> None:
    """The same as purge.

    \b
    Example:
      dlcmd compact pets
    """
    _purge(name, max_unused, keep, grace, dry_run=dry_run)


def _purge(
    name: str, max_unused: int, keep: int | None, grace: int | None, *, dry_run: bool
) -> None:
    as_before = -1
    options = PurgeOptions(
        max_unused,
        as_before if keep is None else keep,
        as_before if grace is None else grace,
        dry_run,
    )
    with (
        open_repository_from_flags() as repository,
        shown_progress(f"purge {name}", "chunks") as show,
    ):
        report = housekeeping.purge(
            repository, name, options, tell=lambda done, total: show(Progress(done, total))
        )
    if global_flags().json:
        say_json({"dataset": name, "dry_run": dry_run, **report.to_message()})
    else:
        _tell(report, dry_run=dry_run)


def _tell(report: PurgeReport, *, dry_run: bool) -> None:
    """The report for people."""
    for note in report.notes:
        say(f"note: {note}")
    would = "would be " if dry_run else ""
    rewritten = f"{count_text(report.rewritten, 'chunk')} {would}rewritten"
    if not dry_run:
        rewritten += f" into {report.written:,}"
    say(f"{rewritten}: {bytes_text(report.unused_bytes)} of them are unused")
    say(
        f"{count_text(report.deleted, 'chunk')} {would}deleted: {bytes_text(report.deleted_bytes)};"
        f" {count_text(report.waiting, 'more chunk')} ({bytes_text(report.waiting_bytes)}) can go"
        " when nobody can be reading them any more"
    )
    say(
        f"{count_text(report.versions_kept, 'version')} kept,"
        f" {report.versions_removed:,} {would}removed;"
        f" {count_text(report.leftovers, 'temporary file')} {would}removed"
    )

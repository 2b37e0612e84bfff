"""The verb `purge`."""

import re

import click

from diesel_fs.errors import UsageError
from diesel_fs.repository.interface import AS_POLICY, PurgeOptions, PurgeReport
from diesel_fs.repository.retention import GRACE_S

from ..args.addresses import open_repository_from_flags
from ..args.options import argument, dataset, duration, global_flags, option, verb
from ..show.output import bytes_text, count_text, print_json, print_line
from ..show.progress import shown_progress

_PERCENT = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))?%?", re.ASCII)
_WHOLE_PPM = 1_000_000


def share(text: str) -> int:
    """Returns millionths."""
    match = _PERCENT.fullmatch(text)
    found = int(match[1]) * 10_000 + int((match[2] or "").ljust(4, "0")) if match else -1
    if not 0 <= found <= _WHOLE_PPM:
        raise UsageError(f"bad percentage {text!r}", advice="write it as 5% or 2.5%")
    return found


@verb("purge")
@argument("name", type=dataset, metavar="DATASET")
@option(
    "--max-unused",
    type=share,
    metavar="PERCENT",
    default="5%",
    show_default=True,
    help="Rewrite chunks of which more than this share is unused.",
)
@option(
    "--keep",
    type=click.IntRange(0),
    metavar="N",
    help="Keep the last N versions readable, from now on.  [default: as before; at first 0]",
)
@option(
    "--grace",
    type=duration,
    metavar="TIME",
    help="How long replaced chunks stay for readers that may still need them: 0, 90m, 7d."
    f"  [default: {GRACE_S // 3600}h, or a longer one set before]",
)
@option("-n", "--dry-run", is_flag=True, help="Change nothing; show what would be done.")
def purge(name: str, max_unused: int, keep: int | None, grace: int | None, dry_run: bool) -> None:
    """Free the space of replaced and deleted files.

    Chunks with much unused space are rewritten, and small chunks are merged. A later purge deletes
    the old chunks, after the grace period, if neither a kept version nor a mount needs them. With
    --grace 0 they are deleted at once; a reader that could not register with the repository then
    loses its files.

    \b
    Examples:
      dlcmd purge pets
      dlcmd purge -n pets
      dlcmd purge --keep 3 --grace 7d pets
    """
    options = PurgeOptions(
        max_unused,
        AS_POLICY if keep is None else keep,
        AS_POLICY if grace is None else grace,
        dry_run,
    )
    with (
        open_repository_from_flags() as repository,
        shown_progress(f"purge {name}", "chunks") as show,
    ):
        report = repository.purge(name, options, show)
    if global_flags().json:
        print_json({"dataset": name, "dry_run": dry_run, **report.to_message()})
    else:
        _print_report(report, dry_run=dry_run)


def _print_report(report: PurgeReport, *, dry_run: bool) -> None:
    for note in report.notes:
        print_line(f"note: {note}")
    would = "would be " if dry_run else ""
    rewritten = f"{count_text(report.rewritten, 'chunk')} {would}rewritten"
    if not dry_run:
        rewritten += f" into {report.written:,}"
    are = "are" if dry_run else "were"
    print_line(f"{rewritten}: {bytes_text(report.unused_bytes)} of them {are} unused")
    print_line(
        f"{count_text(report.deleted, 'chunk')} {would}deleted: {bytes_text(report.deleted_bytes)};"
        f" {count_text(report.waiting, 'more chunk')} ({bytes_text(report.waiting_bytes)}) can be"
        " deleted when no reader can need them any more"
    )
    print_line(
        f"{count_text(report.versions_kept, 'version')} kept,"
        f" {report.versions_removed:,} {would}removed;"
        f" {count_text(report.leftovers, 'temporary file')} {would}removed"
    )

"""The verb `recover`."""

from ..args.addresses import open_repository_from_flags
from ..args.options import argument, dataset, moment_text, option, time, verb
from ..show.output import print_note
from ..show.progress import shown_progress
from .verify import print_findings


@verb("recover")
@argument("name", type=dataset, metavar="DATASET")
@option("--since", type=time, metavar="TIME", help="Read only the chunks that are as new as this.")
@option(
    "--forget-lost",
    is_flag=True,
    help="Rebuild without chunks that are lost or damaged, and list their files.",
)
def recover(name: str, since: float | None, forget_lost: bool) -> None:
    """Rebuild the metadata of a dataset from its chunks, all of them or those since a time.

    If a chunk of the metadata or the newest snapshot is lost or damaged, recover names it and its
    files, changes nothing, and ends with exit code 15. --forget-lost rebuilds without such chunks:
    the dataset then lacks their files. If the object store cannot be reached, recover changes
    nothing and ends with exit code 13.

    \b
    Examples:
      dlcmd recover pets
      dlcmd recover pets --since 2026-01-31T12:00
      dlcmd recover pets --since 2026-01-31T12:00+02:00
      dlcmd recover pets --since 2h
      dlcmd recover pets --forget-lost
    """
    if since is not None:
        print_note(f"recover {name}: reads the chunks since {moment_text(since)}")
    with (
        open_repository_from_flags(rebuild=True) as repository,
        shown_progress(f"recover {name}", "chunks") as show,
    ):
        findings = repository.recover(name, since, show, forget_lost=forget_lost)
    print_findings(findings, name, "recovered" if findings.sound else "read")

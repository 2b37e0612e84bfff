"""The verb `verify`."""

from diesel_fs.errors import CorruptError, ObjectStoreError
from diesel_fs.repository.interface import Findings

from ..args.addresses import open_repository_from_flags
from ..args.options import argument, dataset, global_flags, option, verb
from ..show.output import bytes_text, count_text, print_json, print_line, write_stdout
from ..show.progress import shown_progress


@verb("verify")
@argument("name", type=dataset, metavar="DATASET")
@option(
    "--headers-only", is_flag=True, help="Check the headers of chunks only, not the files' bytes."
)
def verify(name: str, headers_only: bool) -> None:
    """Check the metadata against the chunks, and every checksum.

    It changes nothing. The exit code is 15 if anything is damaged or lost.

    \b
    Examples:
      dlcmd verify pets
      dlcmd verify --headers-only pets
    """
    with (
        open_repository_from_flags() as repository,
        shown_progress(f"verify {name}", "chunks") as show,
    ):
        findings = repository.verify(name, headers_only=headers_only, progress=show)
    print_findings(findings, name, "checked")


def print_findings(findings: Findings, name: str, done: str) -> None:
    """This also prints the result of `recover`; `done` is a participle. Raises CorruptError for
    damage, ObjectStoreError for chunks that could not be read."""
    if global_flags().json:
        described = findings.to_message()
        del described["folded"]
        print_json({"dataset": name, "sound": findings.sound, **described})
    else:
        write_stdout(f"problem: {each}\n".encode() for each in findings.problems)
        write_stdout(f"unreachable: {each}\n".encode() for each in findings.unreachable)
        for note in findings.notes:
            print_line(f"note: {note}")
        print_line(
            f"{done} {count_text(findings.chunks, 'chunk')} with"
            f" {count_text(findings.entries, 'entry')}: {name} has"
            f" {count_text(findings.files, 'file')}, {bytes_text(findings.bytes)}"
        )
    if findings.problems:
        raise CorruptError(f"{name}: {count_text(len(findings.problems), 'problem')} found")
    if findings.unreachable:
        count = count_text(len(findings.unreachable), "chunk")
        raise ObjectStoreError(
            f"{name}: the object store did not deliver {count}", advice="run it again later"
        )

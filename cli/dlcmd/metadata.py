"""`dlcmd save-meta`, `load-meta`, `verify` and `recover`."""

from pathlib import Path

import click

from diesel_fs.errors import CorruptError, DieselError, NoSuchDataset, ObjectStoreError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository import recover as recovery
from diesel_fs.repository.expected_chunks import Findings
from diesel_fs.repository.versions import open_snapshot_file
from diesel_fs.system.atomic_file import is_stdout

from .addresses import Address, open_repository_from_flags
from .options import dataset, global_flags, moment_text, time, verb, versioned_dataset
from .output import Value, bytes_text, count_text, emit, remark, say, say_json
from .progress import Progress, shown_progress


@verb("save-meta")
@click.argument("target", type=versioned_dataset, metavar="DATASET[@VERSION]")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
def save_meta(target: tuple[str, int], file: Path) -> None:
    """Write a snapshot of a dataset: all its metadata at its current version, or at one that is
    kept; for a mount.

    FILE is written whole or not at all.

    \b
    Example:
      dlcmd save-meta pets pets.snapshot
    """
    name, version = target
    with open_repository_from_flags() as repository:
        view = Address(name, version=version).view(repository)
        if is_stdout(file):
            emit([view.buffer])
            return
        repository.snapshots.save(view, file)
    if global_flags().json:
        say_json({**_described(view), "file": str(file)})
    else:
        say(f"wrote version {view.version} of {name} to {file}: {_counts(view)}")


@verb("load-meta")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
def load_meta(file: Path) -> None:
    """Check a snapshot file, show what it holds, and whether it is up to date.

    \b
    Example:
      dlcmd load-meta pets.snapshot
    """
    view = open_snapshot_file(file)
    state = _state(view)
    if global_flags().json:
        say_json({**_described(view), "state": state})
        return
    emit(
        f"{name:<9} {value}\n".encode()
        for name, value in {**_described(view), "state": state}.items()
    )


def _described(view: Snapshot) -> dict[str, Value]:
    return {
        "dataset": view.dataset,
        "identity": str(view.identity),
        "version": view.version,
        "entries": view.entry_count,
        "files": view.file_count,
        "bytes": view.byte_count,
        "chunks": view.chunk_count,
    }


def _counts(view: Snapshot) -> str:
    return f"{count_text(view.file_count, 'file')}, {bytes_text(view.byte_count)}"


def _state(view: Snapshot) -> str:
    """How a snapshot stands to the repository. One that cannot be asked is no error."""
    try:
        with open_repository_from_flags() as repository:
            info = repository.dataset(view.dataset)
            if info.identity != view.identity:
                return "of another dataset that had this name"
            current = repository.newest_known(info)
    except NoSuchDataset:
        return "of a dataset that this repository does not have"
    except DieselError as error:
        return f"not compared: {error.message}"
    if current == view.version:
        return "up to date"
    if current > view.version:
        return f"stale: the current version is {current}"
    return f"newer than the repository, whose metadata is behind at version {current}"


@verb("verify")
@click.argument("name", type=dataset, metavar="DATASET")
@click.option("--headers-only", is_flag=True, help="Do not read the files' bytes.")
def verify(name: str, headers_only: bool) -> None:
    """Check every checksum, and metadata against chunks. Changes nothing; exit 15 if not sound.

    \b
    Examples:
      dlcmd verify pets
      dlcmd verify --headers-only pets
    """
    with (
        open_repository_from_flags() as repository,
        shown_progress(f"verify {name}", "chunks") as show,
    ):
        findings = recovery.verify(
            repository,
            name,
            headers_only=headers_only,
            tell=lambda done, total: show(Progress(done, total)),
        )
    _tell(findings, name, "checked")


@verb("recover")
@click.argument("name", type=dataset, metavar="DATASET")
@click.option("--since", type=time, metavar="TIME", help="Only from chunks as new as that.")
@click.option(
    "--forget-lost",
    is_flag=True,
    help="Accept the loss of chunks that are gone or damaged, and list the files in them.",
)
def recover(name: str, since: float | None, forget_lost: bool) -> None:
    """Rebuild the metadata of a dataset from its chunks, all or from a time on.

    Where a chunk that the metadata or the newest snapshot name is lost or damaged, recover names it
    and its files, leaves everything as it was, and ends with exit code 15. --forget-lost rebuilds
    without such chunks: their files are then no longer part of the dataset. Where the object store
    cannot be reached, everything is left as it was, too, and the exit code is 13.

    \b
    Examples:
      dlcmd recover pets
      dlcmd recover pets --since 2026-01-31T12:00
      dlcmd recover pets --since 2026-01-31T12:00+02:00
      dlcmd recover pets --since 2h
      dlcmd recover pets --forget-lost
    """
    if since is not None:
        remark(f"recover {name}: from the chunks since {moment_text(since)}")
    with (
        open_repository_from_flags(rebuild=True) as repository,
        shown_progress(f"recover {name}", "chunks") as show,
    ):
        findings = recovery.recover(
            repository, name, since, lambda done, total: show(Progress(done, total)),
            forget_lost=forget_lost,
        )  # fmt: skip
    _tell(findings, name, "folded in" if findings.sound else "read")


def _tell(findings: Findings, name: str, done: str) -> None:
    """What was found. Raises CorruptError where that is damage."""
    if global_flags().json:
        say_json(
            {
                "dataset": name,
                "sound": findings.sound,
                "chunks": findings.chunks,
                "entries": findings.entries,
                "files": findings.files,
                "bytes": findings.bytes,
                "problems": findings.problems,
                "unreachable": findings.unreachable,
                "notes": findings.notes,
            }
        )
    else:
        emit(f"problem: {each}\n".encode() for each in findings.problems)
        emit(f"unreachable: {each}\n".encode() for each in findings.unreachable)
        for note in findings.notes:
            say(f"note: {note}")
        say(
            f"{done} {count_text(findings.chunks, 'chunk')} with"
            f" {count_text(findings.entries, 'entry')}: {name} has"
            f" {count_text(findings.files, 'file')}, {bytes_text(findings.bytes)}"
        )
    if findings.problems:
        raise CorruptError(f"{name}: {count_text(len(findings.problems), 'problem')} found")
    if findings.unreachable:
        count = count_text(len(findings.unreachable), "chunk")
        raise ObjectStoreError(f"{name}: the object store did not give {count}")

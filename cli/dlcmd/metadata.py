"""The verbs about metadata: `save-meta`, `load-meta`, `verify` and `recover`."""

from pathlib import Path

import click

from diesel_fs.errors import CorruptError, DieselError, NoSuchDataset, ObjectStoreError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import Findings
from diesel_fs.repository.private_copies import open_snapshot_file, save_snapshot
from diesel_fs.system.atomic_file import is_stdout

from .addresses import Address, open_repository_from_flags
from .options import (
    argument,
    dataset,
    global_flags,
    moment_text,
    option,
    time,
    verb,
    versioned_dataset,
)
from .output import (
    Value,
    bytes_text,
    count_text,
    print_json,
    print_line,
    print_note,
    print_result,
    write_stdout,
)
from .progress import shown_progress


@verb("save-meta")
@argument("target", type=versioned_dataset, metavar="DATASET[@VERSION]")
@argument("file", type=click.Path(path_type=Path), metavar="FILE")
def save_meta(target: tuple[str, int], file: Path) -> None:
    """Write all metadata of a dataset, at its current or a kept version, to a snapshot file.

    `dlcmd mount --snapshot FILE` mounts from it. FILE is written whole or not at all.

    \b
    Example:
      dlcmd save-meta pets pets.snapshot
    """
    name, version = target
    with open_repository_from_flags() as repository:
        view = Address(name, version=version).view(repository)
        if is_stdout(file):
            write_stdout([view.buffer])
            return
        save_snapshot(view, file)
    counts = f"{count_text(view.file_count, 'file')}, {bytes_text(view.byte_count)}"
    print_result(
        {**_described(view), "file": str(file)},
        f"wrote version {view.version} of {name} to {file}: {counts}",
    )


@verb("load-meta")
@argument("file", type=click.Path(path_type=Path), metavar="FILE")
def load_meta(file: Path) -> None:
    """Check a snapshot file; show what it holds, and whether its version is the current one.

    \b
    Example:
      dlcmd load-meta pets.snapshot
    """
    view = open_snapshot_file(file)
    described = {**_described(view), "state": _state(view)}
    if global_flags().json:
        print_json(described)
    else:
        write_stdout(f"{name:<9} {value}\n".encode() for name, value in described.items())


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


def _state(view: Snapshot) -> str:
    """Whether a snapshot has the repository's current version, in words.

    A repository that cannot be reached is no error.
    """
    try:
        with open_repository_from_flags() as repository:
            info = repository.dataset(view.dataset)
            if info.identity != view.identity:
                return "of an earlier dataset of this name"
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
    _print_report(findings, name, "checked")


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

    If a chunk that the metadata or the newest snapshot names is lost or damaged, recover names the
    chunk and its files, changes nothing, and ends with exit code 15. With --forget-lost it rebuilds
    without such chunks: their files are then no longer part of the dataset. If the object store
    cannot be reached, recover changes nothing and ends with exit code 13.

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
    _print_report(findings, name, "recovered" if findings.sound else "read")


def _print_report(findings: Findings, name: str, done: str) -> None:
    """Print what was found. Raises CorruptError for damage, ObjectStoreError for chunks that could
    not be read."""
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

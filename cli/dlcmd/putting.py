"""`dlcmd put`."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import click

from diesel_fs.errors import (
    NoSuchDataset,
    NotFoundError,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.chunk import CHUNK_BYTES_DEFAULT
from diesel_fs.format.entries import Kind, check_path, join
from diesel_fs.ingest import Bucket, PutOptions, PutReport, put_bucket, put_file, put_tar, put_tree
from diesel_fs.ingest.options import COMPRESSIONS, JOBS_MAX
from diesel_fs.ingest.options import PutProgress as Report
from diesel_fs.repository.local import LocalRepository
from diesel_fs.urls import CLOUD_SCHEMES, parse_url

from .addresses import Address, address, open_repository_from_flags
from .options import global_flags, size, verb
from .output import (
    bytes_text,
    count_text,
    emit,
    json_failed,
    json_name,
    name_line,
    raise_if_partial,
    say,
    say_json,
)
from .packing import PROGRAM
from .progress import Progress, shown_progress

_DELETIONS_SHOWN = 10
"""Paths that a dry run names without -v."""


@dataclass(frozen=True, slots=True)
class SourceArgument:
    """Where files come from: a folder or file, or of a folder only `paths`; a tar; a bucket, or
    one object of it, which is `file_name` without its prefix."""

    name: str
    tar: BinaryIO | None = None
    paths: list[bytes] | None = None
    bucket: Bucket | None = None
    file_name: bytes = b""


@verb("put")
@click.argument("arguments", nargs=-1, metavar="[SRC] DATASET[/path]")
@click.option("--tar", metavar="FILE|-", help="Put the entries of a tar, in place of SRC.")
@click.option("--delete", is_flag=True, help="Remove what SRC no longer has.")
@click.option(
    "-n",
    "--dry-run",
    is_flag=True,
    help="Change nothing; say how much there is to do, and what --delete would remove.",
)
@click.option("--allow-empty", is_flag=True, help="Let --delete go by an empty SRC, too.")
@click.option("--checksum", is_flag=True, help="Compare contents, not only size and mtime.")
@click.option(
    "--jobs", type=click.IntRange(1, JOBS_MAX), metavar="N",
    help="How many processes pack.  [default: cores + 1]",
)  # fmt: skip
@click.option(
    "--chunk-size", type=size,
    help="How many bytes of contents go into one chunk, 64K to 1G.  [default: 4M]",
)  # fmt: skip
@click.option(
    "--compress", type=click.Choice(COMPRESSIONS), default="auto", show_default=True,
    help="How contents are stored: lz4 compresses each that gets smaller by it, auto those of which"
    " a sample does, none leaves all as they are.",
)  # fmt: skip
@click.option("--include", multiple=True, metavar="GLOB", help="Put only files that match one.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out files and folders.")
@click.option("--files-from", default="", metavar="FILE|-", help="Put only the paths listed there.")
@click.option("-0", "nul", is_flag=True, help="Those paths end in NUL, not in a newline.")
def put(
    arguments: tuple[str, ...],
    tar: str | None,
    delete: bool,
    dry_run: bool,
    allow_empty: bool,
    checksum: bool,
    jobs: int | None,
    chunk_size: int | None,
    compress: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    files_from: str,
    nul: bool,
) -> None:
    """Pack a folder's contents, a file, a tar or what is in a bucket into a dataset, which is made
    if it is new.

    What is already there unchanged is skipped, so the same command again finishes what was
    interrupted. A file takes the name of the address, unless that is a folder or ends in a slash.
    A glob with a slash is matched against the path below SRC, another against the name; one that
    ends in a slash matches folders only.

    \b
    Examples:
      dlcmd put ~/images pets
      dlcmd put ~/images/train pets/train --delete
      dlcmd put cat.jpg pets/train/cats/
      dlcmd put --exclude '*.tmp' --chunk-size 16M ~/images pets
      tar cz images | dlcmd put --tar - pets
      dlcmd put s3://bucket/images pets
    """
    name, target = _parse_arguments(arguments, tar, files_from, nul)
    options = PutOptions(
        chunk_bytes=CHUNK_BYTES_DEFAULT if chunk_size is None else chunk_size,
        compress=compress,
        jobs=jobs or 0,
        delete=delete,
        dry_run=dry_run,
        checksum=checksum,
        allow_empty=allow_empty,
        include=include,
        exclude=exclude,
    )
    with (
        _source(name, tar is not None, files_from, nul) as source,
        _repository(dry_run=dry_run) as repository,
        shown_progress(f"put {target}") as show,
    ):
        so_far = PutReport()

        def progress(report: PutReport) -> None:
            nonlocal so_far
            so_far = report
            total = max(report.entries_found, report.entries) if report.walked else 0
            show(Progress(report.entries, total, report.content_bytes))

        try:
            report = _put(repository, source, target, options, progress)
        except BaseException as error:  # a Ctrl-C, too: its words say what is done
            if not dry_run and (so_far.files or not isinstance(error, Exception)):
                moved = bytes_text(so_far.content_bytes)
                error.add_note(f"{count_text(so_far.files, 'file')} ({moved}) committed so far")
            raise
    _tell(report, source, target, dry_run=dry_run)


def _parse_arguments(
    words: tuple[str, ...], tar: str | None, files_from: str, nul: bool
) -> tuple[str, Address]:
    """What is to be put, and where. Raises UsageError."""
    wanted = "DATASET[/path]" if tar is not None else "SRC and DATASET[/path]"
    if len(words) != (2 if tar is None else 1):
        raise UsageError(f"put takes {wanted}, not {len(words)} words", advice="see --help")
    if nul and not files_from:
        raise UsageError("-0 says how --files-from is written, which is not given")
    if tar is not None and files_from:
        raise UsageError("--files-from goes with a folder, not with --tar")
    name = words[0] if tar is None else tar
    return name, address(words[-1])


@contextmanager
def _source(name: str, is_tar: bool, names_from: str, nul: bool) -> Iterator[SourceArgument]:
    """The source, looked at before anything is made of the target. Raises NotFoundError."""
    if is_tar:
        with _opened_file(name) as stream:
            yield SourceArgument(name, stream)
        return
    if name.partition("://")[0] in CLOUD_SCHEMES and "://" in name:
        if names_from:
            raise UsageError("--files-from goes with a folder, not with a bucket")
        from .buckets import CloudBucket  # noqa: PLC0415  # it takes a tenth of a second

        url = parse_url(name)
        bucket = CloudBucket(url)
        one = b"" if bucket.single_object is None else os.fsencode(url.prefix.rpartition("/")[2])
        yield SourceArgument(name, bucket=bucket, file_name=one)
        return
    path = Path(name)
    if not path.exists():
        raise NotFoundError(f"there is no file {name}")
    if not (path.is_dir() or path.is_file()):
        raise UsageError(f"{name} is neither a file nor a folder")
    if names_from and not path.is_dir():
        raise UsageError(f"--files-from goes with a folder, and {name} is none")
    file_name = b"" if path.is_dir() else os.fsencode(path.name)
    paths = _listed(names_from, nul) if names_from else None
    yield SourceArgument(name, paths=paths, file_name=file_name)


@contextmanager
def _repository(*, dry_run: bool) -> Iterator[LocalRepository]:
    """The repository, made if it is new; for a dry run an empty one then stands for it."""
    with ExitStack() as stack:
        try:
            repository = stack.enter_context(open_repository_from_flags(create=not dry_run))
        except ObjectMissing:
            where = parse_url(global_flags().settings().repository_url)
            if not dry_run:
                raise
            if where.scheme == "file" and where.path.exists() and any(where.path.iterdir()):
                raise
            folder = stack.enter_context(TemporaryDirectory())
            url = Path(folder).as_uri()
            repository = stack.enter_context(LocalRepository.open(url, create=True))
        yield repository


def _put(
    repository: LocalRepository,
    source: SourceArgument,
    target: Address,
    options: PutOptions,
    progress: Report,
) -> PutReport:
    name, path = target.dataset, target.path
    if source.file_name and (target.must_be_folder or _is_folder(repository, target)):
        path = join(path, source.file_name)
    if source.tar is not None:
        return put_tar(repository, name, source.tar, path, options, progress)
    if source.bucket is not None:
        return put_bucket(repository, name, source.bucket, path, options, progress)
    folder = Path(source.name)
    if not source.file_name:
        return put_tree(repository, name, folder, path, options, progress, source.paths, PROGRAM)
    return put_file(repository, name, folder, path, options, progress)


def _is_folder(repository: LocalRepository, target: Address) -> bool:
    """Whether an address names a folder that is there. The root always is."""
    if not target.path:
        return True
    try:
        view = repository.view(target.dataset)
    except NoSuchDataset:
        return False
    index = view.lookup(target.path)
    return index >= 0 and view.stat(index).kind == Kind.FOLDER


@contextmanager
def _opened_file(name: str) -> Iterator[BinaryIO]:
    """A file of the user's, or standard input for `-`."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 (only its opening is guarded here)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {name}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot read {name}: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # it was only read, and what failed then has been said
            file.close()


def _listed(names_from: str, nul: bool) -> list[bytes]:
    """The paths that --files-from names, each once; `.` is the source. Raises UsageError."""
    with _opened_file(names_from) as file:
        lines = file.read().split(b"\0" if nul else b"\n")
    paths: dict[bytes, None] = {}
    for line in filter(None, lines):
        path = line if line.startswith(b"/") else line.rstrip(b"/")
        while path.startswith(b"./"):  # as `find .` writes them
            path = path[2:]
        paths[b"" if path == b"." else check_path(path)] = None
    return list(paths)


def _tell(report: PutReport, source: SourceArgument, target: Address, *, dry_run: bool) -> None:
    """The result, and on stderr what was left out. Raises PartialError."""
    with suppress(BrokenPipeError):  # that nobody reads this changes nothing of what was done
        _say_result(report, target, dry_run=dry_run)
    raise_if_partial(report.failed, source.name, "put")


def _say_result(report: PutReport, target: Address, *, dry_run: bool) -> None:
    if global_flags().json:
        gone = ({"event": "would delete", **json_name(path)} for path in reversed(report.to_delete))
        emit(json.dumps(each).encode() + b"\n" for each in gone)
        say_json(
            {
                "event": "done",
                "dataset": target.dataset,
                "dry_run": dry_run,
                "files": report.files,
                "bytes": report.content_bytes,
                "chunks": report.chunks,
                "entries": report.entries_found if dry_run else report.entries,
                "unchanged": report.unchanged,
                "deleted": report.deleted,
                "stripped": report.stripped,
                "hard_links": report.hard_links,
                "version": report.version,
                "failed": json_failed(report.failed),
            }
        )
    elif dry_run:
        say(
            f"would put {count_text(report.entries_found, 'entry')} and delete {report.deleted:,};"
            f" {report.unchanged:,} unchanged"
        )
        if not global_flags().quiet:
            emit(_deletion_lines(report.to_delete, everything=global_flags().verbose))
    else:
        say(
            f"put {count_text(report.files, 'file')} ({bytes_text(report.content_bytes)}) in"
            f" {count_text(report.chunks, 'chunk')}; {report.unchanged:,} unchanged,"
            f" {report.deleted:,} deleted; version {report.version}"
        )
        if kept_otherwise := _lost_attributes(report):
            say(f"note: {kept_otherwise}")


def _lost_attributes(report: PutReport) -> str:
    """What of the source the dataset does not keep as it is, in one line; empty for nothing."""
    parts = []
    if report.stripped:
        entries = count_text(report.stripped, "entry")
        parts.append(f"set-user-ID, set-group-ID and sticky bits of {entries} are not kept")
    if report.hard_links:
        parts.append(f"{count_text(report.hard_links, 'hard link')} became files of their own")
    return "; ".join(parts)


def _deletion_lines(gone: Sequence[bytes], *, everything: bool) -> Iterator[bytes]:
    """What a dry run would delete, folders before what is in them; the first few, or everything."""
    left_out = 0 if everything else max(0, len(gone) - _DELETIONS_SHOWN)
    for path in reversed(gone[left_out:]):
        yield b"would delete " + name_line(path)
    if left_out:
        yield f"... and {left_out:,} more; -v names them all\n".encode()

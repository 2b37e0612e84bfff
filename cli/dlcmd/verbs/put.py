"""The verb `put`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from diesel_fs import ingest
from diesel_fs.errors import (
    NoSuchDataset,
    ObjectMissing,
    UsageError,
)
from diesel_fs.format.entries import Kind, join
from diesel_fs.ingest import (
    FetchedManifest,
    PutOptions,
    PutReport,
)
from diesel_fs.ingest.options import COMPRESSIONS, JOBS_MAX, PutProgress
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.urls import parse_url

from ..args.addresses import Address, address, open_repository_from_flags
from ..args.fields import FieldOption, Values, made, options_of
from ..args.options import argument, file_or_dash, global_flags, option, size, verb
from ..args.put_sources import SourceArgument, archives_source, manifest_file, named_source
from ..show.output import (
    bytes_text,
    count_text,
    json_failed,
    json_name,
    name_line,
    print_json,
    print_line,
    print_note,
    raise_if_partial,
    write_stdout,
)
from ..show.progress import ShowProgress, shown_progress

_DELETIONS_SHOWN = 10


@verb("put")
@argument("arguments", nargs=-1, metavar="[SRC...] DATASET[/path]")
@option(
    "--tar",
    type=file_or_dash,
    metavar="FILE|-",
    help="Put the entries of this tar, in place of SRC.",
)
@option(
    "--unpack", is_flag=True,
    help="Put the contents of the archives SRC, of which there may be several: paths, globs, s3://"
    " and https:// addresses of tar, zip, gzip, bzip2, xz and Zstandard files.",
)  # fmt: skip
@option(
    "--manifest", type=file_or_dash, metavar="FILE",
    help="Table of samples and their targets, to be stored as .manifest.csv: CSV or TSV with the"
    " columns path and target. FILE may be an s3:// or https:// address.",
)  # fmt: skip
@options_of(
    PutOptions, "given",
    delete=FieldOption("Delete entries of the dataset that SRC does not have."),
    dry_run=FieldOption(
        "Change nothing; show how much would be put, and what --delete would delete.", short="-n"
    ),
    allow_empty=FieldOption("Let --delete delete everything when SRC is empty."),
    checksum=FieldOption("Compare contents, not only size, mode and mtime."),
    jobs=FieldOption(
        "Number of processes that pack.  [default: cores + 1]",
        type=click.IntRange(1, JOBS_MAX), metavar="N",
    ),
    chunk_bytes=FieldOption(
        "Bytes of contents in one chunk, 64K to 1G.  [default: 4M]", "chunk-size", type=size
    ),
    compress=FieldOption(
        "Compression of contents: lz4 compresses each file that gets smaller by it, auto each file"
        " of which a sample gets smaller, none compresses nothing.",
        type=click.Choice(COMPRESSIONS), shows_default=True,
    ),
    include=FieldOption(
        "Put only files that match one of these globs.", metavar="GLOB", multiple=True
    ),
    exclude=FieldOption(
        "Leave out files and folders that match.", metavar="GLOB", multiple=True
    ),
)  # fmt: skip
@option(
    "--files-from",
    type=file_or_dash,
    metavar="FILE|-",
    help="Put only the paths that this file lists.",
)
@option("-0", "nul", is_flag=True, help="Each path in --files-from ends in NUL, not in a newline.")
def put(
    arguments: tuple[str, ...], given: Values, tar: str | None, unpack: bool, manifest: str | None,
    files_from: str | None, nul: bool,
) -> None:  # fmt: skip
    """Pack the contents of a folder, a file, archives or the objects in a bucket into a dataset.

    A missing dataset is made. Unchanged entries are skipped, so run the same command again to
    finish an interrupted put. A single file gets the path in the address; if that is a folder or
    ends in a slash, the file goes into it under its own name. A glob with a slash is matched
    against the path below SRC, one without against the name; with a slash at its end it matches
    folders only.

    With --unpack each archive is fetched once, and none lies on a disk of this machine. An
    unchanged archive is skipped if the dataset still has all its files. An address may end in
    #sha256= and the 64 hex digits of its content. If several archives have a file with one path,
    the last archive counts.

    The --manifest names the file and the target of each sample. Its first line is `path,target`;
    each further line names a file, relative to DATASET/path, and a class, a number or a text. (With
    `path,target_path` the target is a file, too.) If the dataset lacks a named file, the files are
    put without the manifest, and the exit code is 3. Training scripts read it by DieselDataset(...,
    manifest=True).

    \b
    Examples:
      dlcmd put ~/images pets
      dlcmd put ~/images/train pets/train --delete
      dlcmd put cat.jpg pets/train/cats/
      dlcmd put --exclude '*.tmp' --chunk-size 16M ~/images pets
      tar cz images | dlcmd put --tar - pets
      dlcmd put s3://bucket/images pets
      dlcmd put --unpack 's3://bucket/shards/*.tar.gz' https://host/extra.zip pets
      dlcmd put --unpack cats.zip dogs.zip --manifest labels.csv pets
    """
    if unpack:
        names, target = _parse_unpack(arguments, tar, files_from or "", nul)
        opened = archives_source(names)
    else:
        name, target = _parse_arguments(arguments, tar, files_from or "", nul)
        opened = named_source(name, tar is not None, files_from or "", nul)
    options = made(PutOptions, given)
    fetched = manifest_file(manifest) if manifest else None
    dry_run = options.dry_run
    with (
        opened as source,
        _repository(dry_run=dry_run) as repository,
        shown_progress(f"put {target}") as show,
    ):
        progress = _Progress(show)
        try:
            report = _put(repository, source, target, options, progress, fetched)
        except BaseException as error:  # Ctrl-C too: the message has the committed amount
            so_far = progress.so_far
            if not dry_run and (so_far.files or not isinstance(error, Exception)):
                moved = bytes_text(so_far.content_bytes)
                error.add_note(f"{count_text(so_far.files, 'file')} ({moved}) committed so far")
            raise
    _print_report(report, source, target, dry_run=dry_run)


class _Progress:
    def __init__(self, show: ShowProgress) -> None:
        self._show = show
        self.so_far = PutReport()

    def __call__(self, report: PutReport) -> None:
        self.so_far = report
        total = max(report.entries_found, report.entries) if report.walked else 0
        self._show(report.entries, total, report.content_bytes)


def _parse_arguments(
    arguments: tuple[str, ...], tar: str | None, files_from: str, nul: bool
) -> tuple[str, Address]:
    wanted = "DATASET[/path]" if tar is not None else "SRC and DATASET[/path]"
    if len(arguments) != (2 if tar is None else 1):
        given = count_text(len(arguments), "argument")
        raise UsageError(f"put takes {wanted}, and got {given}", advice="see --help")
    if nul and not files_from:
        raise UsageError("-0 needs --files-from")
    if tar is not None and files_from:
        raise UsageError("--files-from needs a folder as SRC, and cannot be used with --tar")
    name = arguments[0] if tar is None else tar
    return name, address(arguments[-1])


def _parse_unpack(
    arguments: tuple[str, ...], tar: str | None, files_from: str, nul: bool
) -> tuple[Sequence[str], Address]:
    if len(arguments) < 2:
        raise UsageError("put --unpack takes SRC... and DATASET[/path]", advice="see --help")
    if tar is not None or files_from or nul:
        raise UsageError("--unpack cannot be used with --tar, --files-from or -0")
    return arguments[:-1], address(arguments[-1])


@contextmanager
def _repository(*, dry_run: bool) -> Iterator[Repository]:
    """A dry run opens an empty temporary repository instead of making one."""
    with ExitStack() as stack:
        try:
            repository = stack.enter_context(open_repository_from_flags(create=not dry_run))
        except ObjectMissing:
            if not dry_run:
                raise
            missing = parse_url(global_flags().settings().repository_url)
            if missing.scheme == "file" and missing.path.exists() and any(missing.path.iterdir()):
                raise
            folder = stack.enter_context(TemporaryDirectory())
            url = Path(folder).as_uri()
            repository = stack.enter_context(LocalRepository.open(url, create=True))
        yield repository


def _put(
    repository: Repository,
    source: SourceArgument,
    target: Address,
    options: PutOptions,
    progress: PutProgress,
    manifest: FetchedManifest | None,
) -> PutReport:
    if manifest is not None and source.file_name:
        raise UsageError(f"--manifest needs more than one file as SRC, and {source.name} is one")
    name, path = target.dataset, target.path
    if source.file_name and (target.must_be_folder or _is_folder(repository, target)):
        path = join(path, source.file_name)
    return ingest.put(repository, name, source.source, path, options, progress, manifest=manifest)


def _is_folder(repository: Repository, target: Address) -> bool:
    if not target.path:
        return True
    try:
        view = repository.view(target.dataset, lazy=True)
    except NoSuchDataset:
        return False
    index = view.lookup(target.path)
    return index >= 0 and view.stat(index).kind == Kind.FOLDER


def _print_report(
    report: PutReport, source: SourceArgument, target: Address, *, dry_run: bool
) -> None:
    with suppress(BrokenPipeError):  # the put is done, even if nobody reads the result
        _print_result(report, target, dry_run=dry_run)
    if report.all_left_out:
        print_note(f"--include and --exclude leave out all files of {source.name}")
    raise_if_partial(report.failed, source.name, "put")


def _print_result(report: PutReport, target: Address, *, dry_run: bool) -> None:
    if global_flags().json:
        events = (
            {"event": "would delete", **json_name(path)} for path in reversed(report.to_delete)
        )
        write_stdout(json.dumps(event).encode() + b"\n" for event in events)
        print_json(
            {
                "event": "done",
                "dataset": target.dataset,
                "dry_run": dry_run,
                "files": report.files,
                "bytes": report.content_bytes,
                "chunks": report.chunks,
                "entries": report.entries_found if dry_run else report.entries,
                "unchanged": report.unchanged,
                "archives": report.archives,
                "archives_skipped": report.archives_skipped,
                "samples": report.samples,
                "deleted": report.deleted,
                "stripped": report.stripped,
                "hard_links": report.hard_links,
                "version": report.version,
                "failed": json_failed(report.failed),
            }
        )
        return
    if report.archives_skipped:
        print_line(
            f"skipped {report.archives_skipped:,} of {count_text(report.archives, 'archive')}:"
            " put before, and not changed since"
        )
    if dry_run:
        print_line(
            f"would put {count_text(report.entries_found, 'entry')} and delete {report.deleted:,};"
            f" {report.unchanged:,} unchanged"
        )
        if not global_flags().quiet:
            write_stdout(_deletion_lines(report.to_delete, everything=global_flags().verbose))
    else:
        print_line(
            f"put {count_text(report.files, 'file')} ({bytes_text(report.content_bytes)}) in"
            f" {count_text(report.chunks, 'chunk')}; {report.unchanged:,} unchanged,"
            f" {report.deleted:,} deleted; version {report.version}"
        )
        if report.samples:
            print_line(f"the manifest names {count_text(report.samples, 'sample')}")
        if lost := _lost_attributes(report):
            print_line(f"note: {lost}")


def _lost_attributes(report: PutReport) -> str:
    parts = []
    if report.stripped:
        entries = count_text(report.stripped, "entry")
        parts.append(f"set-user-ID, set-group-ID and sticky bits of {entries} are not kept")
    if report.backslashes:
        names = count_text(report.backslashes, "name")
        parts.append(f"backslashes of {names} in zips made by Windows were taken for slashes")
    if report.hard_links:
        parts.append(f"{count_text(report.hard_links, 'hard link')} became files of their own")
    return "; ".join(parts)


def _deletion_lines(to_delete: Sequence[bytes], *, everything: bool) -> Iterator[bytes]:
    """Folders come before their entries. Only the first entries are shown if not `everything`."""
    left_out = 0 if everything else max(0, len(to_delete) - _DELETIONS_SHOWN)
    for path in reversed(to_delete[left_out:]):
        yield b"would delete " + name_line(path)
    if left_out:
        yield f"... and {left_out:,} more; -v shows all of them\n".encode()

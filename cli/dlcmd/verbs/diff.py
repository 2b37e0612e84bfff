"""The verb `diff`."""

import json
from collections.abc import Iterator
from pathlib import Path

from diesel_fs.client.differences import Differences, compare_folder, compare_versions
from diesel_fs.errors import NoSuchDataset, UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import Repository

from ..args.addresses import Address, open_repository_from_flags, versioned_address
from ..args.options import argument, global_flags, option, verb
from ..show.output import json_name, name_line, print_result, raise_if_partial, write_stdout
from ..show.progress import shown_progress

_SIGNS = (("added", b"+ "), ("changed", b"M "), ("removed", b"- "))


def first_side(text: str) -> Address:
    """Raises UsageError for a folder."""
    if text[:1] in ("/", ".", "~"):
        raise UsageError(
            f"{text} is a folder's path, and the first argument is a dataset",
            advice="name the dataset first: `dlcmd diff DATASET FOLDER`",
        )
    return versioned_address(text)


def second_side(text: str) -> Address | Path:
    """Takes a text with a slash, `.` and `..` as a folder, any other as a dataset."""
    return Path(text) if "/" in text or text in (".", "..") else versioned_address(text)


@verb("diff")
@argument("first", type=first_side, metavar="DATASET[@VERSION][/path]")
@argument("second", type=second_side, metavar="DATASET[@VERSION]|FOLDER")
@option("--checksum", is_flag=True, help="Compare a folder's contents, not only size and mtime.")
def diff(first: Address, second: Address | Path, checksum: bool) -> None:
    """Show what differs between two versions, two datasets, or a dataset and a folder.

    Each difference is a line: + if only the second argument has the entry, - if only the first has
    it, M if its mode, mtime, size or content differs. An entry of another kind (a file that is now
    a folder) gets - and +. With a path, only the entries below it are compared. A FOLDER needs a
    slash in its name (./images); the lines are what `put --delete` would do. The exit code is 0
    even if there are differences.

    \b
    Examples:
      dlcmd diff pets@1790000000000000 pets
      dlcmd diff pets/train ~/images/train
      dlcmd diff --json pets ./images | tail -n 1
    """
    with open_repository_from_flags() as repository, shown_progress(f"diff {first}") as show:
        old = first.view(repository)
        if isinstance(second, Path):
            total = len(old)
            found = compare_folder(
                old, first.path, second, checksum=checksum,
                progress=lambda done: show(done, max(done, total)),
            )  # fmt: skip
        else:
            new = _view(repository, second)
            found = compare_versions(old, new, first.path)
    write_stdout(_lines(found))
    _print_counts(found)
    raise_if_partial(found.failed, str(second), "compared")


def _view(repository: Repository, second: Address) -> Snapshot:
    try:
        return second.view(repository)
    except NoSuchDataset as error:
        if Path(second.dataset).is_dir():
            error.advice = f"write ./{second.dataset} to compare with the folder"
        raise


def _lines(found: Differences) -> Iterator[bytes]:
    sides = (found.added, found.changed, found.removed)
    for (event, sign), paths in zip(_SIGNS, sides, strict=True):
        for path in paths:
            if global_flags().json:
                yield json.dumps({"event": event, **json_name(path)}).encode() + b"\n"
            else:
                yield sign + name_line(path or b".")


def _print_counts(found: Differences) -> None:
    counts = {
        "added": len(found.added),
        "changed": len(found.changed),
        "removed": len(found.removed),
        "unchanged": found.unchanged,
    }
    text = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print_result({"event": "done", **counts}, text)

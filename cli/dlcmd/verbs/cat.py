"""The verb `cat`."""

import os

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.repository.interface import Repository

from ..args.addresses import Address, entry_reader, open_repository_from_flags, versioned_address
from ..args.options import argument, verb
from ..show.output import (
    write_stdout,
)


@verb("cat")
@argument(
    "sources", nargs=-1, required=True, type=versioned_address, metavar="DATASET[@VERSION]/path..."
)
def cat(sources: tuple[Address, ...]) -> None:
    """Write the contents of files to standard output, one after the other.

    \b
    Examples:
      dlcmd cat pets/README
      dlcmd cat pets/train/cats/1.jpg > cat.jpg
    """
    with open_repository_from_flags() as repository:
        for source in sources:
            _write_content(repository, source)


def _write_content(repository: Repository, source: Address) -> None:
    view = source.view(repository)
    index = view.index_of(source.path)
    kind = view.stat(index).kind
    if kind == Kind.LINK:
        raise UsageError(f"{source} is a link to {os.fsdecode(view.link(index))!r}")
    if kind == Kind.FOLDER:
        raise UsageError(f"{source} is a folder", advice="`dlcmd get` writes folders")
    with entry_reader(repository, view) as reader:
        for extent in view.extents(index):
            write_stdout([reader.read(index, extent.start, extent.size)])

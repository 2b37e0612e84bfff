"""The verb `du`."""

from contextlib import suppress

import numpy as np

from diesel_fs.errors import DieselError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot import layout
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import Repository

from ..args.addresses import Address, open_repository_from_flags, versioned_address
from ..args.options import argument, global_flags, verb
from ..show.output import bytes_text, json_name, print_json, write_stdout


@verb("du")
@argument("targets", nargs=-1, type=versioned_address, metavar="[DATASET[@VERSION][/path]...]")
def du(targets: tuple[Address, ...]) -> None:
    """Count files, their bytes, and the bytes that they take in the repository.

    Compressed files take fewer bytes than they have. For a whole dataset, "reclaimable" is about
    the bytes that `dlcmd purge` can free.

    \b
    Examples:
      dlcmd du
      dlcmd du pets/train pets/test
    """
    with open_repository_from_flags() as repository:
        everything = [Address(info.name) for info in repository.datasets()]
        for target in targets or everything:
            view = target.view(repository)
            files, content_bytes, stored_bytes = _usage(view, view.index_of(target.path))
            unused = _reclaimable(repository, target, view)
            if global_flags().json:
                print_json(
                    {
                        "dataset": target.dataset,
                        **json_name(target.path),
                        "files": files,
                        "bytes": content_bytes,
                        "stored_bytes": stored_bytes,
                        "reclaimable_bytes": unused,
                    }
                )
                continue
            amounts = f"{bytes_text(content_bytes)} ({content_bytes} bytes)"
            text = f"{files:,} files, {amounts}, stored as {bytes_text(stored_bytes)}"
            if unused:
                text += f", reclaimable {bytes_text(unused)}"
            text += f"\t{target}\n"
            write_stdout([text.encode("utf-8", "surrogateescape")])


def _reclaimable(repository: Repository, target: Address, view: Snapshot) -> int | None:
    """Returns None for a part or an old version, and if the metadata store does not answer."""
    if target.path or target.version:
        return None
    with suppress(DieselError):
        return repository.reclaimable_bytes(target.dataset, view)
    return None


def _usage(view: Snapshot, index: int) -> tuple[int, int, int]:
    """Returns the files at or below an entry, their bytes, and their bytes in the chunks."""
    below = view.walk(index)
    files = below[layout.kinds(view.columns.flags[below]) == Kind.FILE]
    # The column `stored` has 0 for a file of several extents
    with_extents = files[(view.columns.flags[files] & layout.MANY_EXTENTS) != 0]
    stored_bytes = int(view.columns.stored[files].astype(np.uint64).sum())
    stored_bytes += sum(extent.stored for i in with_extents.tolist() for extent in view.extents(i))
    return len(files), int(view.columns.size[files].sum()), stored_bytes

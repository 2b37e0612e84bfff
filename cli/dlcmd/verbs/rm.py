"""The verb `rm`."""

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot

from ..args.addresses import Address, address, open_repository_from_flags
from ..args.options import argument, option, verb
from ..show.output import count_text, print_result


@verb("rm")
@argument("targets", nargs=-1, required=True, type=address, metavar="DATASET/path...")
@option("-r", "--recursive", is_flag=True, help="Delete folders, too, with everything below.")
def rm(targets: tuple[Address, ...], recursive: bool) -> None:
    """Delete files, links or folders. If one of them does not exist, nothing is deleted.

    Mounts of older versions go on. `dlcmd purge` frees the bytes.

    \b
    Examples:
      dlcmd rm pets/train/cats/1.jpg
      dlcmd rm -r pets/train pets/test
    """
    for target in targets:
        if not target.path:
            raise UsageError(
                f"{target} is a whole dataset",
                advice=f"`dlcmd delete-dataset {target} --yes` deletes it",
            )
    with open_repository_from_flags() as repository:
        by_dataset: dict[str, list[Address]] = {}
        for target in targets:
            by_dataset.setdefault(target.dataset, []).append(target)
        for name, chosen in by_dataset.items():  # raises, before any is deleted, if one is missing
            _paths(repository.view(name, lazy=True), chosen, recursive=recursive)
        deleted = 0
        for name, chosen in by_dataset.items():
            session = repository.begin(name, create=False)
            deleted += session.delete(_paths(session.view, chosen, recursive=recursive))
            session.finish()
    print_result({"deleted": deleted}, f"deleted {count_text(deleted, 'entry')}")


def _paths(view: Snapshot, targets: list[Address], *, recursive: bool) -> list[bytes]:
    """The deepest entries come first. Refuses a folder unless `recursive`."""
    chosen: dict[int, None] = {}
    for target in targets:
        index = view.index_of(target.path)
        if view.stat(index).kind == Kind.FOLDER and not recursive:
            raise UsageError(
                f"{target} is a folder", advice="`dlcmd rm -r` deletes it and everything below"
            )
        chosen |= dict.fromkeys(view.walk(index).tolist())
    return view.paths(sorted(chosen, reverse=True))

"""`dlcmd rm` and `dlcmd delete-dataset`."""

import click

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.local import LocalRepository, index_of_path

from .addresses import Address, address, open_repository_from_flags
from .options import dataset, global_flags, verb
from .output import count_text, say, say_json


@verb("rm")
@click.argument("targets", nargs=-1, required=True, type=address, metavar="DATASET/path...")
@click.option("-r", "--recursive", is_flag=True, help="Folders, too, with all that is in them.")
def rm(targets: tuple[Address, ...], recursive: bool) -> None:
    """Delete entries. Nothing is deleted unless all that are named are there.

    Their bytes stay in the chunks; mounts that show an older version go on.

    \b
    Examples:
      dlcmd rm pets/train/cats/1.jpg
      dlcmd rm -r pets/train pets/test
    """
    for target in targets:
        if not target.path:
            raise UsageError(
                f"{target} is a whole dataset", advice=f"dlcmd delete-dataset {target} --yes"
            )
    with open_repository_from_flags() as repository:
        deleted = 0
        for name in dict.fromkeys(target.dataset for target in targets):
            mine = [target for target in targets if target.dataset == name]
            _paths(repository.view(name), mine, recursive=recursive)  # before anything is deleted
        for name in dict.fromkeys(target.dataset for target in targets):
            mine = [target for target in targets if target.dataset == name]
            deleted += _delete(repository, name, mine, recursive=recursive)
    if global_flags().json:
        say_json({"deleted": deleted})
    else:
        say(f"deleted {count_text(deleted, 'entry')}")


def _delete(
    repository: LocalRepository, name: str, targets: list[Address], *, recursive: bool
) -> int:
    session = repository.begin(name, create=False)
    deleted = session.delete(_paths(session.view, targets, recursive=recursive))
    session.finish()
    return deleted


def _paths(view: Snapshot, targets: list[Address], *, recursive: bool) -> list[bytes]:
    """All paths to be deleted, deepest first. Raises NoSuchPath, UsageError."""
    chosen: dict[int, None] = {}
    for target in targets:
        index = index_of_path(view, target.path)
        if view.stat(index).kind == Kind.FOLDER and not recursive:
            raise UsageError(f"{target} is a folder", advice="rm -r deletes it and all in it")
        chosen |= dict.fromkeys(view.walk(index).tolist())
    return view.paths(sorted(chosen, reverse=True))


@verb("delete-dataset")
@click.argument("name", type=dataset, metavar="DATASET")
@click.option("--yes", is_flag=True, help="Needed: there is no way back.")
def delete_dataset(name: str, yes: bool) -> None:
    """Delete a dataset for ever, with its chunks. An interrupted deletion goes on if repeated.

    \b
    Example:
      dlcmd delete-dataset pets --yes
    """
    with open_repository_from_flags() as repository:
        if not yes:
            repository.dataset(name)
            raise UsageError(f"this deletes {name} for ever", advice="say so with --yes")
        done = repository.delete_dataset(name)
    if global_flags().json:
        say_json({"dataset": name, "objects_removed": done.removed, "objects_left": done.left})
    else:
        say(f"deleted {name}: {count_text(done.removed, 'object')}")

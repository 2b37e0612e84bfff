"""The verb `delete-dataset`."""

from diesel_fs.errors import UsageError

from ..args.addresses import open_repository_from_flags
from ..args.options import argument, dataset, option, verb
from ..show.output import count_text, print_result


@verb("delete-dataset")
@argument("name", type=dataset, metavar="DATASET")
@option("--yes", is_flag=True, help="Confirm: the dataset cannot be brought back.")
def delete_dataset(name: str, yes: bool) -> None:
    """Delete a dataset for good, with its chunks.

    Run the same command again to finish an interrupted deletion. Chunks that a mount still reads
    stay; the same command or `dlcmd purge` deletes them after the mount has ended.

    \b
    Example:
      dlcmd delete-dataset pets --yes
    """
    with open_repository_from_flags() as repository:
        if not yes:
            repository.dataset(name)  # raises if there is none
            raise UsageError(f"this would delete {name} for good", advice="confirm it with --yes")
        done = repository.delete_dataset(name)
    print_result(
        {"dataset": name, "objects_removed": done.removed, "objects_left": done.left},
        f"deleted {name}: {count_text(done.removed, 'object')}",
    )

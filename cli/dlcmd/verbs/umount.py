"""The verb `umount`."""

from pathlib import Path

from diesel_fs.mounts import umount as unmount

from ..args.options import argument, mount_folder, option, verb
from ..show.output import print_result


@verb("umount")
@argument("folder", type=mount_folder, metavar="DIR")
@option(
    "--lazy", is_flag=True,
    help="Remove the mount from the folder now; files that are open stay readable.",
)  # fmt: skip
@option("--force", is_flag=True, help="End the mount now; reads that are under way fail.")
def umount(folder: Path, lazy: bool, force: bool) -> None:
    """Unmount a dataset. A mount that is in use stays, and its users are named (exit code 11).

    \b
    Examples:
      dlcmd umount /mnt/pets
      dlcmd umount --lazy /mnt/pets
    """
    unmount(folder, lazy=lazy, force=force)
    print_result({"unmounted": str(folder)}, f"{folder} is unmounted")

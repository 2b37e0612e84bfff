"""The verb `stats`."""

from pathlib import Path

from diesel_fs.mounts import stats as stats_of

from ..args.options import argument, global_flags, mount_folder, verb
from ..show.mount_stats import stats_lines
from ..show.output import print_json, write_stdout


@verb("stats")
@argument("folder", type=mount_folder, metavar="DIR")
def stats(folder: Path) -> None:
    """Show the counters of a mount, its contents in memory, and how far its readers are.

    Counters may be a second old. Reads that the kernel answers from its page cache never reach the
    mount, so they are not counted.

    \b
    Example:
      dlcmd stats /mnt/pets
    """
    found = stats_of(folder)
    if global_flags().json:
        print_json(found)
    else:
        write_stdout(f"{line}\n".encode("utf-8", "surrogateescape") for line in stats_lines(found))

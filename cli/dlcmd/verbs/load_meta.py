"""The verb `load-meta`."""

from pathlib import Path

import click

from diesel_fs.errors import DieselError, NoSuchDataset
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.private_copies import open_snapshot_file

from ..args.addresses import open_repository_from_flags
from ..args.options import (
    argument,
    global_flags,
    verb,
)
from ..show.entries import snapshot_json
from ..show.output import (
    print_json,
    write_stdout,
)


@verb("load-meta")
@argument("file", type=click.Path(path_type=Path), metavar="FILE")
def load_meta(file: Path) -> None:
    """Check a snapshot file; show its contents, and whether its version is the current one.

    \b
    Example:
      dlcmd load-meta pets.snapshot
    """
    view = open_snapshot_file(file)
    described = {**snapshot_json(view), "state": _state(view)}
    if global_flags().json:
        print_json(described)
    else:
        write_stdout(f"{name:<9} {value}\n".encode() for name, value in described.items())


def _state(view: Snapshot) -> str:
    try:
        with open_repository_from_flags() as repository:
            info = repository.dataset(view.dataset)
            if info.identity != view.identity:
                return "of an earlier dataset of this name"
            current = repository.newest_known(info)
    except NoSuchDataset:
        return "of a dataset that this repository does not have"
    except DieselError as error:
        return f"not compared: {error.message}"
    if current == view.version:
        return "up to date"
    if current > view.version:
        return f"stale: the current version is {current}"
    return f"newer than the repository, whose metadata is behind at version {current}"

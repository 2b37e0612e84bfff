"""The verb `save-meta`."""

from pathlib import Path

import click

from diesel_fs.repository.private_copies import save_snapshot
from diesel_fs.system.atomic_file import is_stdout

from ..args.addresses import Address, open_repository_from_flags
from ..args.options import (
    argument,
    verb,
    versioned_dataset,
)
from ..show.entries import snapshot_json
from ..show.output import (
    bytes_text,
    count_text,
    print_result,
    write_stdout,
)


@verb("save-meta")
@argument("target", type=versioned_dataset, metavar="DATASET[@VERSION]")
@argument("file", type=click.Path(path_type=Path), metavar="FILE")
def save_meta(target: tuple[str, int], file: Path) -> None:
    """Write all metadata of a dataset, at its current or a kept version, to a snapshot file.

    `dlcmd mount --snapshot FILE` mounts from it. FILE is written whole or not at all.

    \b
    Example:
      dlcmd save-meta pets pets.snapshot
    """
    name, version = target
    with open_repository_from_flags() as repository:
        view = Address(name, version=version).view(repository)
        if is_stdout(file):
            write_stdout([view.buffer])
            return
        save_snapshot(view, file)
    counts = f"{count_text(view.file_count, 'file')}, {bytes_text(view.byte_count)}"
    print_result(
        {**snapshot_json(view), "file": str(file)},
        f"wrote version {view.version} of {name} to {file}: {counts}",
    )

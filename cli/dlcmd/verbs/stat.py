"""The verb `stat`."""

import stat as modes
from collections.abc import Iterator

from diesel_fs.format.chunk_id import chunk_id_text, id_seconds
from diesel_fs.format.entries import Codec, Stat
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.names import shown

from ..args.addresses import Address, current_view, open_repository_from_flags, versioned_address
from ..args.options import argument, global_flags, verb
from ..show.entries import KIND_BITS, SECOND_NS, dataset_json, entry_json
from ..show.output import Value, print_json, time_text, write_stdout


@verb("stat")
@argument("target", type=versioned_address, metavar="DATASET[@VERSION][/path]")
def stat(target: Address) -> None:
    """Show the metadata of a dataset or an entry; of a file also the chunks with its bytes.

    An extent is the part of a file in one chunk. Offsets count from the chunk's start. A chunk's
    time comes from its ID: it was finished then, just before its upload.

    \b
    Examples:
      dlcmd stat pets
      dlcmd stat pets/train/cats/1.jpg
    """
    with open_repository_from_flags() as repository:
        info = repository.dataset(target.dataset)
        is_current = not target.version
        view = current_view(repository, info, lazy=True) if is_current else target.view(repository)
        index = view.index_of(target.path)
        described = entry_json(view, index, target.path, view.stat(index))
        if not target.path:
            described |= dataset_json(info)
            described |= {"entries": view.entry_count, "version": view.version}
            if info.head is None or info.head.version != view.version:
                described |= {"files": view.file_count, "bytes": view.byte_count}
                described["chunks"] = view.chunk_count
        described["extents"] = _extents(view, index)
    if global_flags().json:
        print_json(described)
    else:
        write_stdout(_described(described, view.stat(index)))


def _extents(view: Snapshot, index: int) -> list[Value]:
    return [
        {
            "start": extent.start,
            "size": extent.size,
            "chunk": chunk_id_text(view.chunk_ids[extent.chunk]),
            "offset": extent.offset,
            "length": extent.stored,
            "codec": Codec(extent.codec).name.lower(),
            "xxh3_64": f"{extent.checksum:016x}",
            "uploaded": id_seconds(view.chunk_ids[extent.chunk]),
        }
        for extent in view.extents(index)
    ]


def _described(described: dict[str, Value], entry: Stat) -> Iterator[bytes]:
    shown_values = {
        **described,
        "mode": modes.filemode(KIND_BITS[entry.kind] | entry.mode),
        "mtime_ns": f"{entry.mtime_ns} ({time_text(entry.mtime_ns / SECOND_NS)})",
    }
    for name, value in shown_values.items():
        if name == "extents" and isinstance(value, list):
            for extent in value:
                assert isinstance(extent, dict)
                extent["uploaded"] = time_text(float(str(extent["uploaded"])))
                parts = " ".join(f"{key}={part}" for key, part in extent.items())
                yield f"extent    {parts}\n".encode()
        else:
            text = shown(str(value).encode("utf-8", "surrogateescape"))
            yield f"{name:<9} {text}\n".encode()

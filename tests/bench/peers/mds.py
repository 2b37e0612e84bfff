"""Packs a folder with MDSWriter of mosaicml-streaming, which also packs samples for training."""

from pathlib import Path

from . import in_peers

NAME = "MDSWriter"
_PROGRAM = Path(__file__).with_name("mds_program.py")


def pack_seconds(source: Path, folder: Path) -> float:
    """Pack the files below `source` into `folder` as samples of path and content. The time from the
    walk to the sync counts; the shards are synced as our chunks are. The start-up (seconds of
    importing torch) does not count, in favour of the peer."""
    return float(in_peers(_PROGRAM, str(source), str(folder)))

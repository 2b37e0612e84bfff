"""Packs a folder with MDSWriter of mosaicml-streaming, which also packs samples for training.

`mds_program` times itself from the walk to the sync. So the start-up (seconds of importing torch)
is not counted, in favour of the peer.
"""

import json
import os
from pathlib import Path

from ..dlcmd import TREE
from . import installed, output_of

NAME = "MDSWriter"
_PROGRAM = Path(__file__).with_name("mds_program.py")


def pack_seconds(source: Path, folder: Path) -> float:
    """Pack the files below `source` into `folder` as samples of path and content, synced as ours
    are."""
    python = installed("python")
    # -P: else the peer may import modules of this folder that have the same names as its own
    command = [python, "-P", str(_PROGRAM), str(source), str(folder)]
    printed = output_of(command, {**os.environ, "PYTHONPATH": str(TREE)})
    report: dict[str, float] = json.loads(printed.splitlines()[-1])
    return report["seconds"]

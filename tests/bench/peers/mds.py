"""MDSWriter of mosaicml-streaming: what else packs a folder of samples for training.

Its start-up (seconds of importing torch) is left out, which favours it: `mds_program` times itself
from the walk to the sync.
"""

import json
import os
from pathlib import Path

from ..dlcmd import TREE
from . import installed, output_of

NAME = "MDSWriter"
_PROGRAM = Path(__file__).with_name("mds_program.py")


def pack_seconds(source: Path, folder: Path) -> float:
    """The files below `source` as samples (path and content) in `folder`, synced like ours."""
    python = installed("python")
    # -P: beside the program lie modules with names that theirs may look for
    command = [python, "-P", str(_PROGRAM), str(source), str(folder)]
    printed = output_of(command, {**os.environ, "PYTHONPATH": str(TREE)})
    report: dict[str, float] = json.loads(printed.splitlines()[-1])
    return report["seconds"]

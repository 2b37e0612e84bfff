"""Writes the folder `share`: man pages, and the completions of three shells.

python -m deploy.packages.share FOLDER
"""

import os
import sys
import time
from pathlib import Path

from diesel_server.main import program as diesel_server
from dlcmd.main import program as dlcmd
from dlcmd.mount_helper import mount_program, umount_program
from dlcmd.verbs.completion import SCRIPTS

from .man_pages import man_pages

PROGRAMS = ((dlcmd, 1), (diesel_server, 8), (mount_program, 8), (umount_program, 8))

COMPLETIONS = {
    "bash": "bash-completion/completions/dlcmd",
    "zsh": "zsh/site-functions/_dlcmd",
    "fish": "fish/vendor_completions.d/dlcmd.fish",
}


def write_share(folder: Path) -> None:
    """The pages have the time SOURCE_DATE_EPOCH, if it is set."""
    time_s = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    dlcmd.name, diesel_server.name = "dlcmd", "diesel-server"
    for program, section in PROGRAMS:
        for name, text in man_pages(program, section, time_s):
            _write(folder / "man" / f"man{section}" / name, text)
    for shell, place in COMPLETIONS.items():
        _write(folder / place, SCRIPTS[shell])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_share(Path(sys.argv[1]))

"""Runs `dlcmd`, and returns its result or raises its error.

A mount's secrets go into the environment of `dlcmd`, which only root may read, never into its
arguments. Of the plugin's own variables, `dlcmd` gets only those that find programs and modules.
Any thread.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diesel_fs.errors import (
    BusyError,
    DeadlineError,
    DieselError,
    FormatError,
    MetadataError,
    NoSpaceError,
    NotFoundError,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
    error_by_class_name,
)
from diesel_fs.system.daemons import minimal_environment

from .volumes import Volume

DLCMD = (sys.executable, "-m", "dlcmd")

SHOWN_LINES, SHOWN_CHARS = 5, 1500
"""If `dlcmd` has reported no error, ours shows this end of its log."""

KILLED_OUTPUT_S = 5.0


def mount_environment(volume: Volume, folder: Path, cache: Path) -> dict[str, str]:
    """`folder` is the mount's own, `cache` is shared. There is no secret among the variables."""
    return {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(cache),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        **volume.environment,
    }


def run_dlcmd(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    deadline_s: float,
    pass_fds: Sequence[int] = (),
) -> dict[str, object]:
    """Runs `dlcmd --json` to its end, and returns the first object that it prints, or {}.

    `dlcmd` inherits the descriptors `pass_fds`, and goes on if this process is killed. Raises the
    error that `dlcmd` reports, or DieselError if it reports none; DeadlineError if it was killed
    after `deadline_s`.
    """
    with subprocess.Popen(
        [*DLCMD, "--json", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={
            **minimal_environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        },
        pass_fds=pass_fds,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=KILLED_OUTPUT_S)
            raise DeadlineError(
                f"`dlcmd {arguments[0]}` took longer than {deadline_s:g} s"
            ) from None
    if process.returncode:
        raise _reported(err.decode(errors="replace"), arguments[0], process.returncode)
    for line in out.splitlines():
        found = json.loads(line)
        assert isinstance(found, dict)
        return found
    return {}


def _reported(text: str, verb: str, code: int) -> DieselError:
    *before, last = text.strip().splitlines() or [""]
    try:
        match json.loads(last):
            case {"error": str(name), "message": str(message), "advice": str(advice)}:
                error = error_by_class_name(name, message, advice)
                shown = f"dlcmd: {error}"  # the first line; the log of the mount may follow it
                error.details = "\n".join(line for line in before if not shown.startswith(line))
                return error
    except ValueError:
        pass
    return error_of_exit(verb, code, text)


def error_of_exit(verb: str, code: int, text: str) -> DieselError:
    kinds = (
        UsageError, NotFoundError, BusyError, PermissionDenied, ObjectStoreError, MetadataError,
        FormatError, NoSpaceError,
    )  # fmt: skip
    kind = next((each for each in kinds if each.exit_code == code), DieselError)
    last = "; ".join(text.strip().splitlines()[-SHOWN_LINES:])[-SHOWN_CHARS:]
    return kind(f"`dlcmd {verb}` ended with exit code {code}: {last or 'it printed nothing'}")

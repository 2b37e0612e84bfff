"""The verb `mount`. This module imports no numpy, so that a mount is fast."""

import grp
import os
import pwd
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, Unpack

import click

from diesel_fs.errors import UsageError
from diesel_fs.mounts import MountRequest, mount_in_foreground
from diesel_fs.mounts import mount as mount_in_background
from diesel_fs.mounts import stats as stats_of
from diesel_fs.peers.members.options import (
    TaskKwargs,
    TaskOptions,
    cli_name,
    option_specs,
    read_key_file,
)

from ..args.fields import FieldOption, Values, made, options_of
from ..args.options import (
    absolute_path,
    argument,
    duration,
    file_path,
    folder_path,
    global_flags,
    mount_folder,
    option,
    size,
    verb,
    versioned_dataset,
)
from ..show.output import print_note, print_result
from ..show.progress import is_bar_shown, shown_progress

NUMBER_MAX = 2**63 - 1

LOADING_POLL_S, LOADING_UNANSWERED_MAX = 0.5, 10
"""After `LOADING_UNANSWERED_MAX` queries without an answer, no more are made."""


_ID = re.compile("[0-9]{1,10}")


def octal(text: str) -> int:
    if not re.fullmatch("[0-7]{1,4}", text):
        raise UsageError(f"bad umask {text!r}", advice="write it in octal digits: 022")
    return int(text, 8)


def user_id(text: str) -> int:
    try:
        return int(text) if _ID.fullmatch(text) else pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise UsageError(f"there is no user {text!r}", advice="give a name or a number") from None


def group_id(text: str) -> int:
    try:
        return int(text) if _ID.fullmatch(text) else grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        raise UsageError(f"there is no group {text!r}", advice="give a name or a number") from None


_P = ParamSpec("_P")


def task_options(command: Callable[_P, None]) -> Callable[_P, None]:
    kinds: dict[str, object] = {"folder": folder_path, "size": size, "time": duration}
    for name, spec in reversed(option_specs().items()):
        if name == "task_key":
            command = option(
                "--task-key-file", type=file_path, metavar="FILE",
                help="A file with the secret of the task's nodes.  [or env: DIESEL_TASK_KEY]",
            )(command)  # fmt: skip
        if not spec.help:  # options without help are not on the command line
            continue
        kinds |= {"count": click.IntRange(spec.low), "choice": click.Choice(spec.choices)}
        kinds["number"] = click.FloatRange(spec.low, spec.high)
        command = option(
            cli_name(name), name, type=kinds.get(spec.kind), metavar=spec.metavar, help=spec.help,
            is_flag=spec.kind == "flag", default=spec.choices[0] if spec.choices else None,
            show_default=bool(spec.choices),
        )(command)  # fmt: skip
    return command


@verb("mount")
@argument("target", type=versioned_dataset, metavar="DATASET[@VERSION]")
@argument("folder", type=mount_folder, metavar="DIR")
@options_of(
    MountRequest, "given",
    snapshot_file=FieldOption(
        "Mount the version in this file, which `dlcmd save-meta` has written.", "snapshot",
        type=absolute_path, metavar="FILE",
    ),
    stale=FieldOption(
        "If the version is not, or may not be, the current one: refuse to mount it, mount it and"
        " warn, or mount it silently.",
        type=click.Choice(["refuse", "warn", "allow"]), shows_default=True,
    ),
    offline=FieldOption(
        "With --snapshot: do not compare its version with the repository's."
    ),
    follow=FieldOption("Show newer versions as soon as they are published."),
    session=FieldOption(
        "How the kernel gets at the dataset. `native` (root only): the whole tree is in the"
        " kernel, which asks this program for contents alone. `kernel`: it asks for names, too."
        " `pyfuse3`, for kernels that are too old for these: opening and closing a file cost a"
        " request, too. All load contents into the kernel's page cache before they are read."
        " `auto` takes the best that works here.",
        type=click.Choice(["auto", "native", "kernel", "pyfuse3"]), shows_default=True,
    ),
    memory_bytes=FieldOption(
        "Memory for contents, with the kernel's page cache. An eighth of it, 256M at most, is for"
        " the mount's own chunks. With --task, three quarters of the rest are for the chunks of the"
        " node's master.  [default: half of the free memory]", "memory", type=size,
    ),
    seed=FieldOption(
        "Seed of the random orders in .diesel/filelist.",
        type=click.IntRange(0, NUMBER_MAX), metavar="N", shows_default=True,
    ),
    group_size=FieldOption(
        "Number of chunks in a group of these orders: their files are shuffled together."
        "  [default: 100]", type=click.IntRange(1, NUMBER_MAX), metavar="N",
    ),
    allow_other=FieldOption("Let other users read the mount."),
    uid=FieldOption(
        "User, by name or number, that all entries belong to.  [default: you]",
        type=user_id, metavar="USER",
    ),
    gid=FieldOption(
        "Group, by name or number, that all entries belong to.  [default: yours]",
        type=group_id, metavar="GROUP",
    ),
    umask=FieldOption(
        "Permission bits to remove from the modes of all entries.",
        type=octal, default="0", shows_default=True,
    ),
)  # fmt: skip
@task_options
@options_of(
    MountRequest, "given",
    log_file=FieldOption(
        "File for the mount's log. The master of a task logs to a file in the default folder."
        "  [default: a file in $XDG_STATE_HOME/diesel, else in ~/.local/state/diesel; with"
        " --foreground stderr]", type=absolute_path, metavar="FILE",
    ),
    metrics=FieldOption(
        "Address at which Prometheus gets the metrics of the mount; without HOST, only from this"
        " machine. Port 0 is any free one, which the mount prints.", metavar="[HOST:]PORT",
    ),
)  # fmt: skip
@option(
    "-f",
    "--foreground",
    is_flag=True,
    help="Serve the mount in this process until it is unmounted.",
)
def mount(
    target: tuple[str, int], folder: Path, given: Values, task_key_file: Path | None,
    foreground: bool, **task: Unpack[TaskKwargs],
) -> None:  # fmt: skip
    """Mount a dataset as a read-only folder. The command returns when files can be read.

    DIR is made if it is missing, and then removed again with the mount. With --policy oneshot, a
    terminal shows how much is loaded; Ctrl-C then ends the display, and not the mount.

    \b
    Examples:
      dlcmd mount pets /mnt/pets
      dlcmd mount -f --memory 1G pets /mnt/pets
      dlcmd mount --follow pets /mnt/pets
      dlcmd mount pets@1790000000000000 /mnt/before
      dlcmd mount --task night-run --rank 0 --world 4 pets /mnt/pets
    """
    settings = global_flags().settings()
    if given.get("memory_bytes") == 0:
        raise UsageError(
            "--memory 0 leaves no room for contents",
            advice="without --memory a mount takes half of the free memory",
        )
    mountpoint = os.path.abspath(folder)
    options = _task(task, task_key_file, mountpoint)
    name, version = target
    request = made(
        MountRequest, given, url=settings.repository_url, dataset=name, mountpoint=mountpoint,
        version=version, policy=options.policy, task_options=options,
    ).with_credentials(settings.credentials)  # fmt: skip
    if foreground:
        mount_in_foreground(request)  # never returns
    mount_in_background(request)
    described, text = (
        {"dataset": name, "mountpoint": mountpoint},
        f"{name} is mounted on {mountpoint}",
    )
    if request.metrics:
        described["metrics"] = str(stats_of(mountpoint)["metrics"])
        text = f"{text}; metrics at {described['metrics']}"
    print_result(described, text)
    if options.policy == "oneshot" and is_bar_shown():
        _show_loading(name, mountpoint)


def _task(task: TaskKwargs, key_file: Path | None, mountpoint: str) -> TaskOptions:
    """A key file wins over DIESEL_TASK_KEY."""
    if task.get("cache_bytes") == 0:
        raise UsageError(
            "--cache-size 0 leaves no room for a cache", advice="leave out --cache-dir"
        )
    if key_file is not None:
        task["task_key"] = ""
    options = TaskOptions.from_kwargs(task, mountpoint, spelled=cli_name)
    return options if key_file is None else replace(options, task_key=read_key_file(key_file))


def _show_loading(name: str, mountpoint: str) -> None:
    unanswered = 0
    try:
        with shown_progress(f"load {name}", "chunks") as show:
            while unanswered < LOADING_UNANSWERED_MAX:
                match stats_of(mountpoint).get("residency"):
                    case {
                        "oneshot_chunks": int(count),
                        "oneshot_done_chunks": int(done),
                        "has_room": bool(has_room),
                    }:
                        show(done, count)
                        if done == count or not has_room:
                            return
                    case _:
                        unanswered += 1
                time.sleep(LOADING_POLL_S)
    except KeyboardInterrupt:
        print_note(
            f"the mount goes on loading; `dlcmd stats {mountpoint}` shows how much is loaded"
        )

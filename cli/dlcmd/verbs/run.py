"""The verb `run`: runs a training command, and announces its reads to the mounts."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

import diesel_fs.torch.hook
from diesel_fs.errors import UsageError
from diesel_fs.orders.shuffle import GROUP_SIZE_DEFAULT
from diesel_fs.torch.hook.diesel_hook import VARIABLE
from diesel_fs.torch.join import SHUFFLES
from diesel_fs.torch.planner import PlanServer

from ..args.options import argument, file_path, global_flags, option, verb
from ..show.run_report import report_page

NOT_EXECUTABLE, NOT_FOUND = 126, 127

_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
_LOOKS_S = (2.0, 3.0, 5.0, 5.0, 5.0, 9.0)
"""Pauses before each look for a process of the command that cannot join (`_unjoined_path`), some
30 s in all. A signal ends a pause without a look."""

_FROM_KERNEL = 0x80  # `si_code`: the terminal has sent the signal to the command as well


@verb("run")
@option(
    "--ahead", type=click.IntRange(0, 7), metavar="EPOCHS", default=1, show_default=True,
    help="Number of further epochs to announce, if they can be foreseen.",
)  # fmt: skip
@option(
    "--shuffle", type=click.Choice(SHUFFLES), default="full", show_default=True,
    help="With `chunk`, replace random orders by chunk-wise ones, which read each chunk once.",
)  # fmt: skip
@option(
    "--group-size", type=click.IntRange(1), metavar="CHUNKS", default=GROUP_SIZE_DEFAULT,
    show_default=True, help="Chunks in a group, for `--shuffle chunk`.",
)  # fmt: skip
@option(
    "--own-seed", is_flag=True,
    help="Give samplers that draw from PyTorch's global generator one of their own, so that their"
    " further epochs can be foreseen. Their orders then differ.",
)  # fmt: skip
@option(
    "--report", type=file_path, metavar="FILE.html",
    help="Write a page that shows how long the loops waited for data, and when.",
)  # fmt: skip
@argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND")
def run(
    ahead: int,
    shuffle: str,
    group_size: int,
    own_seed: bool,
    report: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run a training command, and have the mounts load its files before it reads them.

    Each DataLoader gives the same samples in the same order, unless --shuffle or --own-seed change
    it. When an epoch begins, its samples are announced to the mount that has the files. Without
    PyTorch, or without files in a mount, the command runs as it would alone.

    The exit code is the command's (128 + N if signal N ended it); 126 and 127 if it cannot be
    started. Signals are passed on to it.

    \b
    Examples:
      dlcmd run -- python train.py /mnt/pets/train
      dlcmd run -- torchrun --nproc-per-node 4 train.py
      dlcmd run --shuffle chunk --report run.html -- ./train.sh
    """
    if report is not None:
        _check_writable(report)
    with PlanServer(None if global_flags().quiet else _print_error) as planner:
        settings = planner.settings(
            ahead=ahead, group_size=group_size if shuffle == "chunk" else 0, own_seed=own_seed
        )
        code = _run(command, _environment(os.environ, json.dumps(settings)), planner)
    if report is not None:
        _write(report, report_page(shlex.join(command), code, planner.summary))
    if not global_flags().quiet and code not in (NOT_EXECUTABLE, NOT_FOUND):
        for line in planner.summary.lines():
            _print_error(line)
    raise click.exceptions.Exit(code)


def _check_writable(report: Path) -> None:
    try:
        report.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write the report {report}: {error.strerror}") from error


def _write(report: Path, page: str) -> None:
    try:
        report.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        _print_error(f"cannot write the report {report}: {error.strerror}")


def _environment(inherited: Mapping[str, str], settings: str) -> dict[str, str]:
    hook = os.path.dirname(os.path.abspath(diesel_fs.torch.hook.__file__))
    before = inherited.get("PYTHONPATH")
    path = f"{hook}{os.pathsep}{before}" if before else hook
    return {**inherited, "PYTHONPATH": path, VARIABLE: settings}


def _run(command: Sequence[str], environment: Mapping[str, str], planner: PlanServer) -> int:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        try:
            # No other thread yet: a function may run between fork and exec
            child = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            return _not_started(command[0], error, NOT_FOUND)
        except OSError as error:
            return _not_started(command[0], error, NOT_EXECUTABLE)
        planner.start()
        looks = iter(_LOOKS_S)
        while child.poll() is None:
            got = _next_signal(next(looks, None))
            if got is None:
                if unjoined := _unjoined_path(environment):
                    _print_error(
                        f"nothing is planned for a process of the command, which has PYTHONPATH="
                        f"{unjoined}: write PYTHONPATH={unjoined}:$PYTHONPATH in the script"
                    )
                    looks = iter(())
            elif got.si_signo != signal.SIGCHLD and got.si_code != _FROM_KERNEL:
                child.send_signal(got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _next_signal(patience_s: float | None) -> "signal.struct_siginfo | None":
    """Waits for a signal to forward, or SIGCHLD. Returns None if none comes within `patience_s`
    (None: for ever)."""
    wanted = {*_FORWARDED, signal.SIGCHLD}
    if patience_s is None:
        return signal.sigwaitinfo(wanted)
    return signal.sigtimedwait(wanted, patience_s)


def _unjoined_path(environment: Mapping[str, str]) -> str:
    """A Python process of the command cannot join if its PYTHONPATH lacks our folder. Returns that
    PYTHONPATH, or ""."""
    hook = environment["PYTHONPATH"].partition(os.pathsep)[0]
    settings = f"{VARIABLE}={environment[VARIABLE]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            program = (process / "exe").readlink().name
        except OSError:  # it has ended, or is another user's
            continue
        if settings not in variables or not program.startswith("python"):
            continue
        for each in variables:
            name, _, value = os.fsdecode(each).partition("=")
            if name == "PYTHONPATH" and hook not in value.split(os.pathsep):
                return value
    return ""


def _not_started(name: str, error: OSError, code: int) -> int:
    _print_error(f"cannot start {name!r}: {error.strerror}")
    return code


def _print_error(text: str) -> None:
    """A closed stderr does not change the exit code."""
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(f"dlcmd run: {text}\n")
        sys.stderr.flush()

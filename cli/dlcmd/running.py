"""The verb `run`: runs a training command whose processes tell the mounts what they will read."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import click

import diesel_fs.torch.hook
from diesel_fs.torch.hook.diesel_hook import VARIABLE
from diesel_fs.torch.planner import TrainingPlanner

from .options import global_flags, verb

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""The exit codes of a shell for a command that cannot be started."""

_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
_FROM_KERNEL = 0x80  # `si_code`: the terminal has sent it to the command as well


@verb("run")
@click.option(
    "--ahead", type=click.IntRange(0, 7), metavar="EPOCHS", default=1, show_default=True,
    help="Announce so many further epochs, where they can be foreseen.",
)  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND")
def run(ahead: int, command: tuple[str, ...]) -> None:
    """Run a training command, and have the mounts load its files before it reads them.

    The command is not changed: each DataLoader gives the same samples in the same order. What its
    sampler will give is announced to the mount that has the files, when an epoch begins. Without
    PyTorch, or without files in a mount, the command runs as it would alone.

    The exit code is the command's (128 + N where signal N ended it); 126 and 127 if it cannot be
    started. Signals are passed on to it.

    \b
    Examples:
      dlcmd run -- python train.py /mnt/pets/train
      dlcmd run -- torchrun --nproc-per-node 4 train.py
      dlcmd run --ahead 0 -- ./train.sh
    """
    with TrainingPlanner() as planner:
        environment = _environment(os.environ, planner.environment(ahead=ahead))
        code = _run(command, environment, planner)
    if not global_flags().quiet and code not in (NOT_EXECUTABLE, NOT_FOUND):
        for line in planner.summary.lines():
            sys.stderr.write(f"dlcmd run: {line}\n")
    raise click.exceptions.Exit(code)


def _environment(inherited: Mapping[str, str], settings: str) -> dict[str, str]:
    """The command's environment: its Python processes run the hook, and nothing else differs."""
    hook = os.path.dirname(os.path.abspath(diesel_fs.torch.hook.__file__))
    before = inherited.get("PYTHONPATH")
    path = f"{hook}{os.pathsep}{before}" if before else hook
    return {**inherited, "PYTHONPATH": path, VARIABLE: settings}


def _run(command: Sequence[str], environment: Mapping[str, str], planner: TrainingPlanner) -> int:
    """Run the command to its end, and return its exit code as a shell would."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        try:
            # There is no other thread yet, so a function may run between fork and exec.
            child = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=lambda: _set_mask(mask),  # noqa: PLW1509
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            return _not_started(command[0], error, NOT_FOUND)
        except OSError as error:
            return _not_started(command[0], error, NOT_EXECUTABLE)
        planner.start()
        while child.poll() is None:
            got = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
            if got.si_signo != signal.SIGCHLD and got.si_code != _FROM_KERNEL:
                child.send_signal(got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _set_mask(mask: "set[signal.Signals] | set[int]") -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _not_started(name: str, error: OSError, code: int) -> int:
    sys.stderr.write(f"dlcmd run: cannot start {name!r}: {error.strerror}\n")
    return code

"""The program `dlcmd`: finds the verb, runs it, and turns errors into exit codes.

A verb's module, `verbs/NAME.py`, is imported only when the verb is used, so that the program starts
fast.

After Ctrl-C or another signal, everything that was committed stays, and the same command finishes
the work. If the reader of our stdout has ended, a verb that only reads ends silently with 141, as
SIGPIPE would; a put goes on.
"""

import errno
import itertools
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from diesel_fs.errors import DieselError, NoSpaceError, NotFoundError, PermissionDenied, UsageError
from dlcmd.args.completing import COMPLETE, complete
from dlcmd.args.options import HELP_NAMES, Flags, global_options
from dlcmd.show.output import print_error

VERBS = {
    "put": "Pack a folder, a file or a tar into a dataset.",
    "get": "Write a dataset back to a folder, or into a tar.",
    "ls": "List datasets, or the entries of one.",
    "stat": "Show the metadata of a dataset or an entry.",
    "cat": "Write the contents of files to standard output.",
    "rm": "Delete files, links or folders.",
    "du": "Count files, their bytes, and the space that they take.",
    "diff": "Compare two versions, two datasets, or a dataset and a folder.",
    "save-meta": "Write a dataset's metadata to a snapshot file.",
    "load-meta": "Check a snapshot file and show its contents.",
    "delete-dataset": "Delete a dataset for good.",
    "purge": "Free the space of replaced and deleted files.",
    "verify": "Check the metadata against the chunks, and every checksum.",
    "recover": "Rebuild the metadata from the chunks.",
    "mount": "Mount a dataset as a read-only folder.",
    "umount": "Unmount a dataset.",
    "stats": "Show the counters and the state of a mount.",
    "top": "Show live how long readers of a mount wait, and for what.",
    "dashboard": "Show mounts, tasks, servers and datasets as a live page.",
    "warmup": "Load the files at a path of a mount before they are read.",
    "run": "Run a training command whose reads the mounts know ahead.",
    "shuffle": "Print the files in chunk-wise random order.",
    "forecast": "Predict what a training job will read, hit, cost and wait for.",
    "doctor": "Check what a job needs here, with advice.",
    "user": "Add, remove, list, export or import the users of a server.",
    "grant": "Give a user a role on a dataset.",
    "completion": "Print the code with which a shell completes dlcmd.",
}

ENDLESS = {"top", "dashboard"}

SYNONYMS = {
    "add": "put", "copy": "put", "cp": "put", "upload": "put", "download": "get", "list": "ls",
    "info": "stat", "delete": "rm", "remove": "rm", "del": "rm", "unmount": "umount",
    "check": "verify", "fsck": "verify", "repair": "recover", "gc": "purge", "compact": "purge",
    "status": "stats", "diagnose": "doctor", "debug": "doctor", "bench": "doctor",
    "support": "doctor", "plan": "forecast",
}  # fmt: skip

INTERRUPTED = 130
READER_GONE = 141  # 128 + SIGPIPE


class TerminatedBySignal(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Verbs(click.Group):
    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        word = name.replace("-", "_")
        command = getattr(import_module(f"dlcmd.verbs.{word}"), word)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in VERBS and not context.resilient_parsing and word[:1] != "-":
            near = [SYNONYMS.get(word), *get_close_matches(word, VERBS, 1)]
            meant = next(filter(None, near), None)
            advice = f"did you mean `dlcmd {meant}`?" if meant else "see `dlcmd --help`"
            raise UsageError(f"unknown verb {word!r}", advice=advice)
        return super().resolve_command(context, args)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs (`dlcmd VERB --help` has examples)"):
            formatter.write_dl([*VERBS.items()])


@global_options
@click.group(cls=_Verbs, context_settings=HELP_NAMES)
def program() -> None:
    """Pack datasets of many small files into chunks, and serve them to training jobs.

    An address is DATASET or DATASET/path. The options below may stand before or after the verb.

    \b
    Examples:
      dlcmd put ~/images pets           pack a folder
      dlcmd ls -l pets/train            list the entries of a folder
      dlcmd mount pets /mnt/pets        mount it
      dlcmd umount /mnt/pets            unmount it

    \b
    Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 some files failed,
    10 no such dataset or path, 11 busy, 12 not allowed, 13 object store failed,
    14 metadata store failed, 15 corruption found, 16 no space, 130 interrupted,
    143 terminated, 129 terminal closed, 141 the reader of the output has ended.
    """


def main() -> NoReturn:
    prepare_process()
    if COMPLETE in os.environ:
        complete(program, os.environ[COMPLETE])
    code = run(sys.argv[1:])
    # Otherwise the interpreter reports at its end that it cannot flush stdout
    if code == READER_GONE:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def prepare_process() -> None:
    """Call this before any verb runs."""
    # `put` forks its packing processes, which is safe only without threads. OpenBLAS would start
    # some when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP: that stays so
            signal.signal(number, _raise_terminated)


def _raise_terminated(number: int, _: FrameType | None) -> NoReturn:
    raise TerminatedBySignal(number)


def run(arguments: Sequence[str]) -> int:
    # Behind `--` are the options of the command that `dlcmd run` runs
    own = {*itertools.takewhile(lambda word: word != "--", arguments)}
    context: click.Context | None = None
    flags = Flags(json="--json" in own, verbose={"-v", "--verbose"} & own != set())
    try:
        with program.make_context("dlcmd", list(arguments), obj=flags) as context:
            program.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as exited:
        return exited.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError, AttributeError):
            sys.stderr.write(f"{error.format_message()}\n")
        return 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dlcmd"
        text = error.format_message().removesuffix(".")
        print_error(DieselError(text, advice=f"see `{command} --help`"), flags, code=2)
        return 2
    except (KeyboardInterrupt, click.Abort) as interrupt:
        text = f"interrupted{_notes(interrupt)}{_again(context)}"
        print_error(DieselError(text), flags, code=INTERRUPTED)
        return INTERRUPTED
    except TerminatedBySignal as ended:
        name = signal.Signals(ended.number).name
        text = f"ended by {name}{_notes(ended)}{_again(context)}"
        print_error(DieselError(text), flags, code=128 + ended.number)
        return 128 + ended.number
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return READER_GONE
        reported = as_diesel_error(error)
        if flags.verbose and is_expected(error):
            reported.details = "\n".join(filter(None, [reported.details, *causes(error)]))
        elif flags.verbose:
            with suppress(OSError):
                traceback.print_exc()
        reported.message += _notes(error)
        print_error(reported, flags)
        return reported.exit_code
    return 0


def is_expected(error: Exception) -> bool:
    return (
        isinstance(error, DieselError) or as_diesel_error(error).exit_code != DieselError.exit_code
    )


def causes(error: BaseException) -> Iterator[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield f"after {type(cause).__name__}: {cause}"
        yield from causes(cause)


def _again(context: click.Context | None) -> str:
    """`context` is None if the interruption came before the verb was known."""
    is_endless = context is not None and context.invoked_subcommand in ENDLESS
    return "" if is_endless else "; run it again to finish"


def _notes(error: BaseException) -> str:
    """The notes that a verb has added to the exception: how much is done."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def as_diesel_error(error: Exception) -> DieselError:
    """An exception that is neither a DieselError nor an OSError is a bug."""
    if isinstance(error, DieselError):
        return error
    if not isinstance(error, OSError):
        text = f"unexpected {type(error).__name__}: {error}"
        return DieselError(text, advice="this is a bug; -v shows where")
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    text = f"{where}{error.strerror or error}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpaceError(text)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return PermissionDenied(text)
        case errno.ENOENT if not error.filename and _folder_is_gone():
            return NotFoundError("the current folder has been removed", advice="go to another one")
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundError(text)
        case errno.EIO | errno.ESTALE | errno.EREMOTEIO | errno.ENXIO | errno.ENODEV:
            return PermissionDenied(text, advice="check whether the disk is failing (`dmesg`)")
    return DieselError(text)


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _reader_gone() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))

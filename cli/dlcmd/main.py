"""The program: finding a verb, and ending with the right exit code whatever happens.

Owned here: the table of verbs (whose modules are imported when they are asked for: start-up time
counts), and the one map from errors to exit codes and to words on stderr. Not owned: what the verbs
do, and how results look (`output.py`).

Ctrl-C ends with 130, SIGTERM with 143, a lost terminal with 129; what was committed by then stays,
and the same command again goes on from there. Where the reader of stdout has gone, a verb that only
reads ends silently with 141, as by SIGPIPE; a put goes on.
"""

import errno
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
from click.shell_completion import shell_complete

from diesel_fs.errors import (
    DieselError,
    NoSpaceError,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from dlcmd.completing import COMPLETE
from dlcmd.options import HELP_NAMES, Flags, global_options
from dlcmd.output import complain

VERBS = {
    "put": ("putting", "Pack a folder, a file or a tar into a dataset."),
    "get": ("getting", "Write a dataset back to a folder, or into a tar."),
    "ls": ("listing", "List datasets, or what is in one."),
    "stat": ("listing", "Show what is known of a dataset or an entry."),
    "cat": ("getting", "Write the contents of files to standard output."),
    "rm": ("removing", "Delete entries."),
    "du": ("listing", "Count files, their bytes, and the bytes that they take."),
    "diff": ("comparing", "Show what differs between versions, or from a folder."),
    "save-meta": ("metadata", "Write a dataset's snapshot to a file."),
    "load-meta": ("metadata", "Check a snapshot file, and show what it holds."),
    "delete-dataset": ("removing", "Delete a dataset for ever."),
    "purge": ("housekeeping", "Give back the space of what has been replaced or deleted."),
    "compact": ("housekeeping", "The same as purge."),
    "verify": ("metadata", "Check metadata against chunks, and every checksum."),
    "recover": ("metadata", "Rebuild metadata from the chunks."),
    "mount": ("mounting", "Mount a dataset as a read-only folder."),
    "umount": ("mounting", "Take a mount away."),
    "stats": ("mounting", "Show what a mount does."),
    "shuffle": ("shuffling", "Print a chunk-wise order of the files."),
    "user": ("accounts", "Add, remove, list, export or import the users of a server."),
    "grant": ("accounts", "Give a user a role on a dataset."),
    "completion": ("completing", "Print what makes a shell complete verbs and options."),
}
"""By verb: the module with a function named after it, and the first line of its help."""

SYNONYMS = {
    "add": "put", "copy": "put", "cp": "put", "upload": "put", "download": "get", "list": "ls",
    "info": "stat", "delete": "rm", "remove": "rm", "del": "rm", "unmount": "umount",
    "check": "verify", "fsck": "verify", "repair": "recover", "gc": "purge", "status": "stats",
}  # fmt: skip
"""What other programs call what is a verb of ours."""

INTERRUPTED = 130
READER_GONE = 141  # 128 + SIGPIPE, as a program that does not handle it


class TerminatedBySignal(BaseException):
    """A signal has asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Verbs(click.Group):
    """The verbs of the table, imported when asked for."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = import_module(f"dlcmd.{VERBS[name][0]}")
        command = getattr(module, name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is meant. Raises UsageError, with the one that may have been meant."""
        word = args[0]
        if word not in VERBS and not context.resilient_parsing and word[:1] != "-":
            near = [SYNONYMS.get(word), *get_close_matches(word, VERBS, 1)]
            meant = next(filter(None, near), None)
            advice = f"did you mean `dlcmd {meant}`?" if meant else "see `dlcmd --help`"
            raise UsageError(f"there is no verb {word!r}", advice=advice)
        return super().resolve_command(context, args)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs (`dlcmd VERB --help` has examples)"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@global_options
@click.group(cls=_Verbs, context_settings=HELP_NAMES)
def program() -> None:
    """Packs datasets of many small files into chunks, and serves them to training jobs.

    Addresses are DATASET or DATASET/path. Global options may stand before or after the verb.

    \b
    Examples:
      dlcmd put ~/images pets           pack a folder
      dlcmd ls -l pets/train            look at it
      dlcmd mount pets /mnt/pets        mount it
      dlcmd umount /mnt/pets

    \b
    Exit codes: 0 done, 1 unexpected, 2 usage, 3 some files failed, 10 no such
    dataset or path, 11 busy, 12 not allowed, 13 object store, 14 metadata store,
    15 corruption found, 16 no space, 130 interrupted, 143 terminated, 129 hung up,
    141 nobody reads.
    """


def main() -> NoReturn:
    """The entry point."""
    # numpy's linear algebra is not used, and its threads would make forks of packing processes
    # forks of a process with threads
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if COMPLETE in os.environ:  # a shell asks, by what `dlcmd completion` has told it
        sys.exit(shell_complete(program, {}, "dlcmd", COMPLETE, os.environ[COMPLETE]))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has them ignored
            signal.signal(number, _end)
    code = run(sys.argv[1:])
    if code == READER_GONE:  # or the interpreter would complain of what it cannot flush
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise TerminatedBySignal(number)


def run(arguments: Sequence[str]) -> int:
    """Run `dlcmd` with these arguments in this process; the exit code."""
    flags = Flags(json="--json" in arguments, verbose={"-v", "--verbose"} & {*arguments} != set())
    try:
        with program.make_context("dlcmd", list(arguments), obj=flags) as context:
            program.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError, AttributeError):
            sys.stderr.write(f"{error.format_message()}\n")
        return 2
    except click.UsageError as error:
        known = error.ctx.command_path if error.ctx else "dlcmd"
        text = error.format_message().removesuffix(".")
        complain(DieselError(text, advice=f"see `{known} --help`"), flags, code=2)
        return 2
    except (KeyboardInterrupt, click.Abort) as interrupt:
        text = f"interrupted{_notes(interrupt)}; run it again to finish"
        complain(DieselError(text), flags, code=INTERRUPTED)
        return INTERRUPTED
    except TerminatedBySignal as ended:
        by = signal.Signals(ended.number).name
        text = f"ended by {by}{_notes(ended)}; run it again to finish"
        complain(DieselError(text), flags, code=128 + ended.number)
        return 128 + ended.number
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return READER_GONE
        known_error = described(error)
        if flags.verbose and is_expected(error):
            known_error.details = "\n".join(filter(None, [known_error.details, *causes(error)]))
        elif flags.verbose:
            with suppress(OSError):
                traceback.print_exc()
        known_error.message += _notes(error)
        complain(known_error, flags)
        return known_error.exit_code
    return 0


def is_expected(error: Exception) -> bool:
    """Whether the words of an error say all: where in the program it was raised helps nobody."""
    return isinstance(error, DieselError) or described(error).exit_code != DieselError.exit_code


def causes(error: BaseException) -> Iterator[str]:
    """What led to an error, the nearest first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield f"after {type(cause).__name__}: {cause}"
        yield from causes(cause)


def _notes(error: BaseException) -> str:
    """What a verb has said of how far it has come."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def described(error: Exception) -> DieselError:
    """Any exception as one of ours: with its words, its advice and its exit code."""
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
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundError(text)
        case errno.EIO | errno.ESTALE | errno.EREMOTEIO | errno.ENXIO | errno.ENODEV:
            return PermissionDenied(text, advice="look whether the disk fails (`dmesg`)")
    return DieselError(text)


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))

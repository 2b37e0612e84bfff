"""Answers a shell when a user presses TAB.

The code that `dlcmd completion SHELL` prints sends `dlcmd` the line up to the cursor, and gets
lines of three fields, separated by tabs: kind, whole word, description. The kind `plain` is a
finished word, `part` one that goes on (a folder); `file` and `dir` leave the word to the shell. An
argument with the metavariable `DATASET...` is completed from the repository.

A TAB must not hang or print errors: after a failure or a timeout, nothing is printed.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from ..show.output import time_text, write_stdout
from .options import Flags

if TYPE_CHECKING:
    from diesel_fs.format.snapshot.reader import Snapshot


COMPLETE = "_DLCMD_COMPLETE"
"""The variable by which a shell's code makes `dlcmd` complete a line; its value is the shell's
name. `_DLCMD_LINE` has the line up to the cursor; `_DLCMD_TEXT` (bash only) has the end of the line
that bash will replace."""

ANSWER_DEADLINE_S = 2.0
"""Most repositories answer in milliseconds."""

WORDS_MAX = 2000
"""If more entries of a folder fit, only the common prefix of their names is offered."""


def complete(program: click.Command, shell: str) -> NoReturn:
    line, text = os.environ.get("_DLCMD_LINE", ""), os.environ.get("_DLCMD_TEXT", "")
    with suppress(Exception), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # a message would disturb the user's line
        answer = "".join(
            f"{each.type}\t{_as_typed(each.value, line, text) if shell == 'bash' else each.value}"
            f"\t{(each.help or '').partition(chr(10))[0]}\n"
            for each in completions(program, line, _limit_time)
        )
        write_stdout([answer.encode()])
    os._exit(0)


def _limit_time() -> None:
    watch = threading.Timer(ANSWER_DEADLINE_S, os._exit, (0,))
    watch.daemon = True
    watch.start()


def completions(
    program: click.Command, line: str, opening: Callable[[], None] = lambda: None
) -> list[CompletionItem[str]]:
    """An item of the type `file` or `dir` has no value: the shell completes it. `opening` is called
    before a repository is opened. Raises DieselError."""
    *words, last = split_arg_string(line + "x")  # so that a blank at the end begins a word
    last = last[:-1]
    lead = last[: last.find("=") + 1] if last.startswith("-") else ""
    for parameter in _command(program, words[1:]).params:
        # click has no hook for all parameters of a command
        parameter.shell_complete = partial(_values, parameter, opening)  # type: ignore[method-assign]  # click: by instance
    items = ShellComplete(program, {"obj": Flags()}, "dlcmd", COMPLETE).get_completions(
        words[1:], last
    )
    for each in items:
        each.value = f"{lead}{each.value}" if each.type in ("plain", "part") else ""
    # Control characters would break the lines of the answer
    return [each for each in items if f"{each.value}".isprintable()]


def _command(program: click.Command, words: Sequence[str]) -> click.Command:
    context = click.Context(program)
    for word in words:
        found = program.get_command(context, word) if isinstance(program, click.Group) else None
        program = found or program
    return program


def _values(
    parameter: click.Parameter,
    opening: Callable[[], None],
    context: click.Context,
    incomplete: str,
) -> list[CompletionItem[str]]:
    metavar = parameter.metavar or ""
    found = click.Parameter.shell_complete(parameter, context, incomplete)
    if isinstance(parameter, click.Argument) and "DATASET" in metavar:
        found += _addresses(opening, context, metavar, incomplete)
    if metavar.startswith("DIR"):
        found = [CompletionItem("", "dir")]
    elif re.search("FILE|FOLDER|SRC", metavar) and "file" not in [each.type for each in found]:
        found.append(CompletionItem("", "file"))
    return found


def _addresses(
    opening: Callable[[], None], context: click.Context, metavar: str, incomplete: str
) -> Iterator[CompletionItem[str]]:
    flags = context.find_object(Flags)
    if flags is None or incomplete[:1] in ("/", ".", "~"):
        return
    # These take longer to import than a verb to complete
    from diesel_fs.format.entries import Kind  # noqa: PLC0415
    from diesel_fs.remote.open import open_configured  # noqa: PLC0415
    from diesel_fs.storage.objects.cloud.direct import open_buckets_directly  # noqa: PLC0415

    opening()
    open_buckets_directly()
    has_path = "/path" in metavar
    name, slash, path = incomplete.partition("/")
    dataset, at, version = name.partition("@")
    if (slash and not has_path) or (at and "@VERSION" not in metavar):
        return
    end, kind = ("/", "part") if has_path else ("", "plain")
    with open_configured(flags.settings()) as repository:
        if slash:
            view = repository.view_at(dataset, int(version)) if at else repository.view(dataset)
            yield from _entries(view, name, path, Kind.FOLDER)
        elif at:
            for kept in reversed(repository.kept_versions(dataset)):
                if str(kept.version).startswith(version):
                    published = time_text(kept.published_ns / 1e9)
                    yield CompletionItem(f"{dataset}@{kept.version}{end}", kind, published)
        else:
            for each in repository.datasets():
                if each.name.startswith(name):
                    yield CompletionItem(f"{each.name}{end}", kind)


def _entries(
    view: "Snapshot", name: str, path: str, folder_kind: int
) -> Iterator[CompletionItem[str]]:
    folder, slash, start = path.rpartition("/")
    top = f"{name}/{folder}{slash}"
    children = view.children(view.index_of(os.fsencode(folder)))
    names = dict(zip(children, view.names(children), strict=True))
    fitting = {i: each for i, each in names.items() if each.startswith(os.fsencode(start))}
    if len(fitting) > WORDS_MAX:
        pairs = zip(min(fitting.values()), max(fitting.values()), strict=False)
        common = bytes(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        yield CompletionItem(f"{top}{common.decode('utf-8', 'ignore')}", "part")
        return
    for i, each in fitting.items():
        with suppress(UnicodeDecodeError):  # a shell could not write it
            is_folder = view.stat(i).kind == folder_kind
            word = f"{top}{each.decode()}"
            yield CompletionItem(f"{word}/", "part") if is_folder else CompletionItem(word)


def _as_typed(word: str, line: str, text: str) -> str:
    """bash replaces only the part behind the last character of COMP_WORDBREAKS, such as `@`, and
    quotes nothing. `text` is the end of the line that bash will replace."""
    *_, typed = split_arg_string(line + "x")
    typed, (text, *_) = typed[:-1], [*split_arg_string(text), ""]
    if typed.endswith(text):
        word = word.removeprefix(typed[: len(typed) - len(text)])
    match _open_quote(line):
        case "'":
            return word.replace("'", "'\\''")
        case '"':
            return re.sub(r'(["$`\\])', r"\\\1", word)
    return re.sub(r"([^\w@%+=:,./~-])|^~", r"\\\g<0>", word)


def _open_quote(line: str) -> str:
    quote, is_escaped = "", False
    for each in line:
        if is_escaped or (each == "\\" and quote != "'"):
            is_escaped = not is_escaped
        elif each in "'\"" and quote in ("", each):
            quote = "" if quote else each
    return quote

"""The error tree is the one drawn in its module, and has the promised exit codes."""

import copy
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from diesel_fs import errors
from diesel_fs.errors import DieselError
from diesel_fs.net.messages import error_message
from diesel_fs.storage.objects.cloud.answers import ExpiredCredentials, PermanentStoreError

from .rows import each_row
from .test_layers import modules

EXIT_CODES = {1, 2, 3, 10, 11, 12, 13, 14, 15, 16}
"""The exit codes of failures other than signals. Scripts of users depend on them."""

LINE = re.compile(r"(?P<lead>[ │├└─]*)(?P<name>\w+) +(?P<exit>\d+|exit) +(?P<errno>\w+)")


@dataclass(frozen=True, slots=True)
class Drawn:
    name: str
    above: str
    exit_code: int
    errno: str


def drawing(text: str) -> list[Drawn]:
    found: list[Drawn] = []
    above: list[str] = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            continue
        depth = len(match["lead"]) // 4 - 1
        if depth:
            found.append(Drawn(match["name"], above[depth - 1], int(match["exit"]), match["errno"]))
        above[depth:] = [match["name"]]
    return found


def tree(top: type[DieselError] = DieselError) -> Iterator[Drawn]:
    for kind in top.__subclasses__():
        if kind.__module__ == errors.__name__:
            code = errno.errorcode[kind.errno]
            yield Drawn(kind.__name__, top.__name__, kind.exit_code, code)
            yield from tree(kind)


def all_kinds(top: type[DieselError] = DieselError) -> Iterator[type[DieselError]]:
    for kind in top.__subclasses__():
        yield kind
        yield from all_kinds(kind)


def test_the_drawing_is_the_tree() -> None:
    assert drawing(str(errors.__doc__)) == list(tree())
    assert len(drawing(str(errors.__doc__))) > 20


@each_row(
    ("text", "other"),
    [
        ("PartialError                       3", "PartialError                       4"),
        ("11  EBUSY", "11  EAGAIN"),
        ("│   ├── ConfigError", "├── ConfigErro"),
        ("    ├── BusyError                         11  EBUSY\n", ""),
    ],
)
def test_a_wrong_drawing_is_found(text: str, other: str) -> None:
    right = str(errors.__doc__)
    assert text in right
    assert drawing(right.replace(text, other)) != list(tree())


def test_every_error_has_a_promised_exit_code_and_an_errno() -> None:
    for name in modules():
        if name.startswith("diesel_fs.") and not name.endswith("__main__"):
            import_module(name)
    kinds = [kind for kind in all_kinds() if kind.__module__.startswith("diesel_fs.")]
    assert "StaleChunk" in {kind.__name__ for kind in kinds}  # one that a caller defines
    assert {
        kind.__name__: kind.exit_code for kind in kinds if kind.exit_code not in EXIT_CODES
    } == {}
    assert {kind.exit_code for kind in kinds} == EXIT_CODES - {DieselError.exit_code}
    assert [kind for kind in kinds if kind.errno not in errno.errorcode] == []


def test_every_error_has_a_docstring() -> None:
    here = [kind for kind in all_kinds() if kind.__module__ == errors.__name__]
    assert [kind for kind in here if not kind.__doc__] == []
    assert str(DieselError("what failed", advice="what to do")) == "what failed; what to do"


def test_a_missing_path_is_a_file_not_found_error_too() -> None:
    """A copy is made when the error is sent to another process."""
    made = errors.NoSuchPath("no 'x' in dataset 'd'", advice="look")
    assert issubclass(errors.NoSuchPath, FileNotFoundError)
    for error in (made, copy.deepcopy(made)):
        assert str(error) == "no 'x' in dataset 'd'; look"
        assert (error.errno, error.strerror) == (errno.ENOENT, os.strerror(errno.ENOENT))
        assert (error.message, error.advice, error.exit_code) == (made.message, "look", 10)
        assert error_message(error)["error"] == "NoSuchPath"
    assert type(errors.error_by_class_name("NoSuchPath", "what", "do")) is errors.NoSuchPath


class _ErrorWithPaths(errors.BusyError):
    """An error class with a constructor that takes more than a message and an advice."""

    def __init__(self, message: str, paths: list[str]) -> None:
        super().__init__(message)


@each_row(
    ("name", "kind"),
    [
        ("NoSpaceError", errors.NoSpaceError),
        ("MetadataBehind", errors.MetadataBehind),
        ("DieselError", DieselError),
        ("_ErrorWithPaths", errors.BusyError),
        ("KeyError", DieselError),
        ("", DieselError),
    ],
)
def test_an_error_of_another_process_keeps_its_class(name: str, kind: type[DieselError]) -> None:
    error = errors.error_by_class_name(name, "what", "do this")
    assert type(error) is kind
    assert (error.message, error.advice) == ("what", "do this")


def test_an_error_is_sent_as_a_class_that_every_process_knows() -> None:
    """A class of one module would become a plain DieselError (exit code 1) in a process that has
    not imported that module, so its public ancestor is sent."""
    for kind, ancestor in (
        (PermanentStoreError, "ObjectStoreError"),
        (ExpiredCredentials, "ObjectStoreRefused"),
    ):
        assert error_message(kind("words")) == {"error": ancestor, "message": "words", "advice": ""}
    assert error_message(errors.NoSpaceError("words", advice="do"))["error"] == "NoSpaceError"

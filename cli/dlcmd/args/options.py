"""The global options of all verbs of `dlcmd`, and the types of option values.

A type is a function from text to a value that raises UsageError for bad text; click calls it. This
module imports little (no numpy), since every start of `dlcmd` pays for it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

import diesel_fs
from diesel_fs.errors import UsageError
from diesel_fs.names import check_dataset_name, parse_versioned_name
from diesel_fs.settings import Settings, load_settings, parse_size

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

_P = ParamSpec("_P")
_Command = TypeVar("_Command", bound=click.Command)

_WHOLE = re.compile(r"-?\d{1,19}", re.ASCII)
_NUMBER = re.compile(r"-?(\d{1,19}(\.\d{0,19})?|\.\d{1,19})(e-?\d)?", re.ASCII | re.IGNORECASE)
_EXAMPLE = 8  # a number in advice, if the option has no default

_AGO = re.compile(r"(\d{1,6})([smhdw])", re.ASCII)
_AGO_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(slots=True)
class Flags:
    url: str | None = None
    user: str | None = None
    key_file: str | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def settings(self) -> Settings:
        """These options win over all other settings. Raises ConfigError."""
        return load_settings({"url": self.url, "user": self.user, "key_file": self.key_file})


class _Checked(click.Parameter):
    """Refuses an empty value (as of an unset variable in a script), and numbers that are not plain
    digits. Its errors name the option."""

    def type_cast_value(self, ctx: click.Context, value: object) -> object:
        if ctx.resilient_parsing or isinstance(self.type, click.types.UnprocessedParamType):
            return super().type_cast_value(ctx, value)
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, str):
                self._check(each)
        try:
            return super().type_cast_value(ctx, value)
        except UsageError as error:
            if isinstance(self, click.Option):
                error.message = f"{self._shown_name}: {error.message}"
            raise

    @property
    def _shown_name(self) -> str:
        is_option = isinstance(self, click.Option)
        return max(self.opts, key=len) if is_option else (self.metavar or self.human_readable_name)

    def _check(self, text: str) -> None:
        kind, name = self.type, self._shown_name
        if not text and isinstance(self, click.Option):
            raise UsageError(f"{name}: its value is empty", advice="give a value, or leave it out")
        if not text and self.nargs == 1 and not isinstance(kind, click.types.FuncParamType):
            raise UsageError(f"{name} is empty", advice="give a path: . is the current folder")
        is_whole = isinstance(kind, click.types.IntParamType)
        if not is_whole and not isinstance(kind, click.types.FloatParamType):
            return
        if not (_WHOLE if is_whole else _NUMBER).fullmatch(text):
            what = "whole number of at most 19 digits" if is_whole else "number"
            default = self.default if isinstance(self.default, int | float) else 0
            example = default or _EXAMPLE
            raise UsageError(f"{name}: {text!r} is no {what}", advice=f"write it as {example:g}")


class _Option(_Checked, click.Option): ...


class _Argument(_Checked, click.Argument): ...


option = partial(click.option, cls=_Option)

argument = partial(click.argument, cls=_Argument)

file_path = click.Path(path_type=Path, dir_okay=False, readable=False)
folder_path = click.Path(path_type=Path, file_okay=False, readable=False)
"""click does not check that these paths can be read: it would call an unreadable file wrong
usage."""


class _AbsolutePath(click.Path):
    """Makes a path absolute, for a program that runs in another folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:  # fmt: skip
        return os.path.abspath(os.fsdecode(super().convert(value, param, ctx)))


absolute_path = _AbsolutePath(dir_okay=False, readable=False)

file_or_dash = click.Path(dir_okay=False, readable=False, allow_dash=True)


def global_flags() -> Flags:
    flags = click.get_current_context().find_object(Flags)
    assert flags is not None
    return flags


def _remember(context: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    flags = context.find_object(Flags)
    if flags is not None and option.name is not None and value:
        setattr(flags, option.name, value)


_GLOBAL = (
    (("--url",), "URL", "The repository to work on.  [env: DIESEL_URL; default: your own]"),
    (("--user",), "NAME", "Your account on a server.  [env: DIESEL_USER]"),
    (("--key-file",), "FILE", "The file with your account's key.  [or env: DIESEL_KEY]"),
    (("--json",), None, "Print results as JSON, for programs."),
    (("-q", "--quiet"), None, "Print errors only."),
    (("-v", "--verbose"), None, "Print causes of errors, and all that `put -n` would delete."),
)


def global_options(command: _Command) -> _Command:
    command.params += [
        _Option(
            names,
            is_flag=metavar is None,
            metavar=metavar,
            help=text,
            expose_value=False,
            callback=_remember,
        )
        for names, metavar, text in _GLOBAL
    ]
    return click.version_option(diesel_fs.__version__, prog_name="dlcmd")(command)


def verb(name: str) -> Callable[[Callable[_P, None]], click.Command]:
    """Makes a function a verb with the global options. Its docstring is the verb's help."""

    def decorate(function: Callable[_P, None]) -> click.Command:
        return global_options(click.command(name, context_settings=HELP_NAMES)(function))

    return decorate


def size(text: str) -> int:
    """Parses 4096, 64K, 4M or 1G. (Help texts show this function's name: SIZE.)"""
    return parse_size(text)


def time(text: str) -> float:
    """Parses 2026-01-31 or 2026-01-31T12:00 (both in this machine's time zone),
    2026-01-31T12:00+02:00, 2026-01-31T12:00Z, or 90m or 7d for a time ago. Returns seconds since
    1970."""
    ago, now = _AGO.fullmatch(text), datetime.now().astimezone()
    try:
        if ago is not None:
            then = now - timedelta(**{_AGO_UNITS[ago[2]]: int(ago[1])})
        else:
            then = datetime.fromisoformat(text).astimezone()  # without a zone it is local
        seconds = then.timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"bad time {text!r}",
            advice="write it as 2026-01-31T12:00 or 2026-01-31T12:00+02:00, or 90m or 7d for ago",
        ) from None
    if then > now:
        raise UsageError(
            f"the time {text!r} lies in the future: it means {moment_text(seconds)}, and now it is"
            f" {moment_text(now.timestamp())}"
        )
    return seconds


def moment_text(seconds: float) -> str:
    local = datetime.fromtimestamp(seconds).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S %z} ({local.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"


def duration(text: str) -> int:
    """Parses 0, 90m or 7d. Returns seconds."""
    match = _AGO.fullmatch(text)
    if match is not None:
        return int(timedelta(**{_AGO_UNITS[match[2]]: int(match[1])}).total_seconds())
    if text != "0":
        raise UsageError(f"bad length of time {text!r}", advice="write it as 0, 90m, 24h or 7d")
    return 0


ALL_VERSIONS = -1
"""The version in an address `DATASET@`, which means all kept versions."""


def check_dataset_argument(text: str) -> str:
    """Raises UsageError for a file's path or a URL: perhaps two arguments were swapped."""
    if text[:1] in ("/", ".", "~") or "://" in text:
        context = click.get_current_context()
        order = " ".join(context.command.collect_usage_pieces(context))
        raise UsageError(
            f"{text!r} stands where the name of a dataset is expected",
            advice=f"the order is: {context.command_path} {order}",
        )
    return text


def versioned_dataset(text: str) -> tuple[str, int]:
    return parse_versioned_name(check_dataset_argument(text))


def dataset(text: str) -> str:
    """Refuses a path or version."""
    name, at, _ = check_dataset_argument(text).partition("@")
    check_dataset_name(name)
    if at:
        raise UsageError(
            f"{text}: this verb works on the current version only",
            advice=f"leave out the @: {name}",
        )
    return name


mount_folder = click.Path(path_type=Path, readable=False)
"""click does not check that it can be read: it would call another user's mount wrong usage."""

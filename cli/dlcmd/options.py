"""What the verbs share on the command line: global options, and how values are read.

Imports little (no numpy): every start of `dlcmd` pays for it. Addresses are in `addresses.py`. A
function that reads a value is given to click as its type, and raises UsageError.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ParamSpec, TypeVar

import click

import diesel_fs
from diesel_fs.errors import UsageError
from diesel_fs.names import check_dataset_name, parse_versioned_name
from diesel_fs.settings import Settings, load_settings, parse_size

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

_P = ParamSpec("_P")
_Command = TypeVar("_Command", bound=click.Command)

_AGO = re.compile(r"(\d{1,6})([smhdw])", re.ASCII)
_AGO_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(slots=True)
class Flags:
    """The global options, as they were found before and after the verb; the latter win."""

    url: str | None = None
    user: str | None = None
    key_file: str | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def settings(self) -> Settings:
        """These, the environment and the configuration file together. Raises ConfigError."""
        return load_settings({"url": self.url, "user": self.user, "key_file": self.key_file})


def global_flags() -> Flags:
    """The global options of the command that is running."""
    found = click.get_current_context().find_object(Flags)
    assert found is not None
    return found


def _remember(context: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    found = context.find_object(Flags)
    if found is not None and option.name is not None and value:
        setattr(found, option.name, value)


_GLOBAL = (
    (("--url",), "URL", "The repository.  [env: DIESEL_URL; default: your own]"),
    (("--user",), "NAME", "The account on a server.  [env: DIESEL_USER]"),
    (("--key-file",), "FILE", "A file with the account's key.  [or env: DIESEL_KEY]"),
    (("--json",), None, "Results as JSON on stdout."),
    (("-q", "--quiet"), None, "Say nothing but errors."),
    (("-v", "--verbose"), None, "Say more: causes of errors, and all that `put -n` would delete."),
)


def global_options(command: _Command) -> _Command:
    """Give a command the options that may stand before or after the verb."""
    command.params += [
        click.Option(
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
    """Make a function the verb `name`; its docstring is the help, with examples."""

    def made(function: Callable[_P, None]) -> click.Command:
        return global_options(click.command(name, context_settings=HELP_NAMES)(function))

    return made


def size(text: str) -> int:
    """Bytes: 4096, 64K, 4M, 1G. (`--help` calls it by the name of this function.)"""
    return parse_size(text)


def time(text: str) -> float:
    """A time that has been, in seconds since 1970: 2026-01-31, 2026-01-31T12:00 (by this machine's
    zone), 2026-01-31T12:00+02:00, 2026-01-31T12:00Z, 90m (ago), 7d (ago)."""
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
            f"the time {text!r} is still to come: it is {moment_text(seconds)}, and now it is"
            f" {moment_text(now.timestamp())}"
        )
    return seconds


def moment_text(seconds: float) -> str:
    """A time by this machine's zone, with its offset, and by UTC."""
    local = datetime.fromtimestamp(seconds).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S %z} ({local.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"


def duration(text: str) -> int:
    """A length of time in seconds: 0, 90m, 7d."""
    match = _AGO.fullmatch(text)
    if match is not None:
        return int(timedelta(**{_AGO_UNITS[match[2]]: int(match[1])}).total_seconds())
    if text != "0":
        raise UsageError(f"bad length of time {text!r}", advice="write it as 0, 90m, 24h or 7d")
    return 0


ALL_VERSIONS = -1
"""In an address: the list of versions."""


def check_dataset_argument(text: str) -> str:
    """An argument that begins with the name of a dataset. Raises UsageError where a path or a URL
    stands in its place, as where two arguments have been swapped.
    """
    if text[:1] in ("/", ".", "~") or "://" in text:
        context = click.get_current_context()
        order = " ".join(context.command.collect_usage_pieces(context))
        raise UsageError(
            f"{text!r} stands where the name of a dataset is expected",
            advice=f"the order is: {context.command_path} {order}",
        )
    return text


def versioned_dataset(text: str) -> tuple[str, int]:
    """As `parse_versioned_name`."""
    return parse_versioned_name(check_dataset_argument(text))


def dataset(text: str) -> str:
    """The name of a dataset, without a path or version. Raises UsageError."""
    name, at, _ = check_dataset_argument(text).partition("@")
    check_dataset_name(name)
    if at:
        raise UsageError(
            f"{text}: this is done to a dataset as it is now", advice=f"leave @ away: {name}"
        )
    return name

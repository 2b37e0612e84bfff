"""What the verbs share on the command line: global options, and the types of values.

Imports little (no numpy): every start of `dlcmd` pays for it. Addresses are in `addresses.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

import click

from diesel_fs.errors import UsageError
from diesel_fs.names import check_dataset_name
from diesel_fs.settings import Settings, load_settings

_Decorated = TypeVar("_Decorated", bound=Callable[..., object])

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)(?:i?B)?", re.IGNORECASE)
_AGO = re.compile(r"(\d{1,9})([smhdw])")
_AGO_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(slots=True)
class Flags:
    """The global options, as they were found before or after the verb (the latter win)."""

    url: str | None = None
    user: str | None = None
    key_file: str | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def settings(self) -> Settings:
        """These, the environment and the configuration file together. Raises ConfigError."""
        return load_settings({"url": self.url, "user": self.user, "key_file": self.key_file})


def flags() -> Flags:
    """The global options of the command that is running."""
    found = click.get_current_context().find_object(Flags)
    assert found is not None
    return found


def _remember(context: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    found = context.find_object(Flags)
    if found is not None and option.name is not None and value:
        setattr(found, option.name, value)


def global_options(command: _Decorated) -> _Decorated:
    """Give a command the options that may stand before or after the verb."""
    options = [
        click.option("--url", help="The repository.  [env: DIESEL_URL; default: your own]"),
        click.option("--user", help="The account on a server.  [env: DIESEL_USER]"),
        click.option("--key-file", help="A file with the account's key.  [or env: DIESEL_KEY]"),
        click.option("--json", is_flag=True, help="Results as JSON on stdout."),
        click.option("-q", "--quiet", "quiet", is_flag=True, help="Say nothing but errors."),
        click.option("-v", "--verbose", "verbose", is_flag=True, help="Say more of errors."),
    ]
    for option in options:
        kept = option.__closure__
        del kept
    return command


class SizeType(click.ParamType[int]):
    """A number of bytes: 4096, 64K, 4M, 1G."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no size; write it as 4096, 64K, 4M or 1G", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]

"""Loads the user's settings, reads files with secrets, and names the user's own folders.

Flags win over the environment, the environment over `~/.config/diesel/config.toml`, and that over
the defaults. Unknown keys are errors. Loaded settings do not change. Functions that need a home
folder raise ConfigError without one.
"""

import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from .credentials import Credentials, no_user_named, parse_key
from .errors import ConfigError, PermissionDenied, UsageError
from .urls import SERVER_SCHEMES, parse_url

log = logging.getLogger("diesel.settings")

KEY_FILE_BYTES_MAX = 4096
"""A limit for files with one secret; a key has 57 characters."""

READ_DEADLINE_S = 30.0

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Settings:
    """An empty text means that a setting is not given."""

    url: str = ""
    user: str = ""
    key_file: str = ""
    key: str = field(default="", repr=False)  # only from the environment

    @property
    def repository_url(self) -> str:
        """The default is the one in the user's data folder."""
        return self.url or data_folder().as_uri()

    @property
    def credentials(self) -> Credentials | None:
        """None if the repository has no server. Raises ConfigError, PermissionDenied."""
        url = parse_url(self.repository_url)
        if url.scheme not in SERVER_SCHEMES:
            return None
        if not self.user:
            raise no_user_named(url)
        if self.key:
            return Credentials(self.user, parse_key(self.key))
        if not self.key_file:
            raise ConfigError(
                f"no key for the user {self.user!r}", advice="give it by --key-file or DIESEL_KEY"
            )
        return Credentials(self.user, _key_in(Path(self.key_file)))


_ENVIRONMENT = {"url": "DIESEL_URL", "user": "DIESEL_USER", "key": "DIESEL_KEY"}


def load_settings(
    flags: Mapping[str, str | None], environment: Mapping[str, str] | None = None
) -> Settings:
    """Read `flags` (None: not given), the environment (None: this process's) and the configuration
    file. Raises ConfigError for unknown keys and wrong types in the file."""
    env = os.environ if environment is None else environment
    try:
        file = config_file()
    except ConfigError:  # no home folder (a daemon, a container): flags and environment suffice
        settings = Settings()
    else:
        settings = replace(Settings(), **_from_file(file))
    settings = replace(settings, **{k: env[v] for k, v in _ENVIRONMENT.items() if env.get(v)})
    if flags.get("key_file"):  # a flag wins over the environment
        settings = replace(settings, key="")
    return replace(settings, **{k: v for k, v in flags.items() if v is not None})


def parse_size(text: str) -> int:
    """The bytes in a text such as 4096, 64K, 4M or 1G. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"bad size {text!r}", advice="write it as 4096, 64K, 4M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


def private_bytes(path: Path, what: str, bytes_max: int) -> bytes:
    """The content of a file with a secret, which only its user should be able to read.

    If others may read it, raises PermissionDenied, or logs a warning once if this user cannot
    change the mode: container engines mount secrets read-only or as another user, with their own
    modes. `what` names the content in messages. Raises ConfigError if the file cannot be read, or
    is longer than `bytes_max`.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                if _can_change_mode(file.fileno(), status.st_uid):
                    raise PermissionDenied(
                        f"others may read {what} in {path}", advice=f"chmod 600 {path}"
                    )
                _warn_others_may_read(path, what)
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} in {path}: {error.strerror}") from error
    if len(content) > bytes_max:
        raise ConfigError(f"{path} is too long for {what} (at most {bytes_max} bytes)")
    return content


def _can_change_mode(descriptor: int, owner: int) -> bool:
    is_ours = os.geteuid() in (0, owner)
    return is_ours and not os.fstatvfs(descriptor).f_flag & os.ST_RDONLY


@cache
def _warn_others_may_read(path: Path, what: str) -> None:
    log.warning(
        "others may read %s in %s, and this user cannot change that; its owner, or the engine that "
        "mounts it, can give it the mode 0400",
        what,
        path,
    )


def private_text(path: Path, what: str, bytes_max: int) -> str:
    """As `private_bytes`; a byte that is not ASCII becomes U+FFFD."""
    return private_bytes(path, what, bytes_max).decode("ascii", errors="replace")


def _key_in(path: Path) -> bytes:
    text = private_text(path, "the key", KEY_FILE_BYTES_MAX)
    try:
        return parse_key(text)
    except ConfigError as error:
        error.message = f"{path} holds no key"
        raise


def _from_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no text, or too deep
        raise ConfigError(f"cannot read {path}: {error}") from error
    known = {each.name for each in fields(Settings)} - {"key"}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}", advice=f"known: {sorted(known)}")
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {key} must be a string")
    return values


def config_file() -> Path:
    """The file may be missing."""
    return _home("XDG_CONFIG_HOME", ".config") / "diesel" / "config.toml"


def data_folder() -> Path:
    """The folder of the user's own repository; it may be missing."""
    return _home("XDG_DATA_HOME", ".local/share") / "diesel"


def user_folders() -> dict[str, Path]:
    """The folders of `config`, `data`, `state` and `cache`; they may be missing."""
    return {
        "config": config_file().parent,
        "data": data_folder(),
        "state": _home("XDG_STATE_HOME", ".local/state") / "diesel",
        "cache": _home("XDG_CACHE_HOME", ".cache") / "diesel",
    }


def state_folder() -> Path:
    """Holds logs of background programs; made if missing."""
    return private_folder(_home("XDG_STATE_HOME", ".local/state") / "diesel")


def runtime_folder() -> Path:
    """Holds sockets of running programs; made if missing. Raises PermissionDenied if other users
    can enter it."""
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    if value.startswith("/") and os.access(value, os.W_OK | os.X_OK):
        folder = private_folder(Path(value) / "diesel")
    else:
        # Nodes may share a home folder, but a socket belongs to one node
        folder = private_folder(state_folder() / f"run-{os.uname().nodename}")
    if folder.lstat().st_mode & 0o077:
        raise PermissionDenied(f"others can enter {folder}", advice=f"chmod 700 {folder}")
    return folder


def cache_folder() -> Path:
    """Holds copies that can be fetched again, such as snapshots; made if missing."""
    return private_folder(_home("XDG_CACHE_HOME", ".cache") / "diesel")


def private_folder(path: Path) -> Path:
    """Make sure that only this user can write to the folder `path`. Raises PermissionDenied."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise PermissionDenied(f"cannot make the folder {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionDenied(f"{path} is not a folder of this user")
    if status.st_mode & 0o022:
        raise PermissionDenied(f"others can write to {path}", advice=f"chmod 700 {path}")
    return path


def _home(variable: str, default: str) -> Path:
    """The folder that an XDG variable names, or else `default` in the home folder."""
    value = os.environ.get(variable, "")
    if value.startswith("/"):  # the XDG specification demands that relative paths are ignored
        return Path(value)
    try:
        return Path.home() / default
    except RuntimeError as error:
        raise ConfigError("no home folder", advice=f"set {variable}") from error

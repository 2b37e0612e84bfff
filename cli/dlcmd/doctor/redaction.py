"""Takes secrets out of texts that leave this machine: known values, and texts that look secret.

Pure, except `known_secrets`, which reads this process's environment and the user's own files.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from diesel_fs.credentials import KEY_PREFIX
from diesel_fs.errors import DieselError
from diesel_fs.settings import Settings, config_file
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.urls import parse_url, passwords_in, shown_url

HIDDEN = "***"

SECRET_BYTES_MIN = 4
"""Shorter values stay: replacing them everywhere would spoil the text."""

SECRETS_BYTES_MAX = 64 << 10

_SECRET_NAME = re.compile(
    r"(?:KEYS?|SECRETS?|TOKENS?|PASS|PASSPHRASE|CREDENTIALS?|AUTH|SIGNATURE)(?:_|$)|PASSW",
    re.IGNORECASE,
)
"""Names that hold a secret. (`TOKENIZERS_PARALLELISM` and `GIT_AUTHOR_NAME` do not.)"""
_PATH_NAME = re.compile(r"_(FILE|DIR|PATH|SOCK|URI|URL|MODULE)$", re.IGNORECASE)
"""Names with the place of a secret, not the secret itself."""

_LOOKS_SECRET = (
    re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9+/=]*"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}\b"),
    re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z)", re.S),
)
_NAMED_SECRET = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|secret|token|authorization|signature|credential"
    r"|(?:access|api|account|private)[_-]?key|cookie|\bsig)[a-z_-]{0,24}\\?[\"']?\s*[=:]\s*)"
    r"(?:(?:bearer|basic)\s+)?(\\?\".*?\"|'[^']*'|[^\s\"',;&}\]]+)"
)


class Redactor:
    def __init__(self, secrets: Iterator[str]) -> None:
        known = {each for each in secrets if len(each) >= SECRET_BYTES_MIN}
        ordered = sorted(known, key=len, reverse=True)  # a secret may be a part of another
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """Hides known secrets, the passwords in URLs, and texts that look like secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = shown_url(text)
        for pattern in _LOOKS_SECRET:
            text = pattern.sub(HIDDEN, text)
        return _NAMED_SECRET.sub(rf"\1{HIDDEN}", text)

    def value(self, value: object) -> object:
        """A text under a name such as `password` is hidden whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): HIDDEN
                if isinstance(each, str) and each and _NAMED_SECRET.match(f"{name}=x")
                else self.value(each)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value


def known_secrets(
    settings: Settings | None, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yields the secrets of the environment (None: this process's), of files that it names, and of
    the settings."""
    env = os.environ if environment is None else environment
    for name, value in env.items():
        if _SECRET_NAME.search(name) and not _PATH_NAME.search(name):
            yield from _forms(value)
        # A proxy may be named without a scheme
        yield from passwords_in(value if "://" in value else f"://{value}")
    files = [env.get("DIESEL_REDIS_PASSWORD_FILE", "")]
    files.append(env.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials"))
    with suppress(DieselError):  # without a home folder there is no such file
        files.append(str(config_file()))
    if settings is not None:
        files.append(settings.key_file)
        yield from passwords_in(settings.url)
        with suppress(DieselError):
            if meta := parse_url(settings.url).meta:
                address = parse_redis_url(meta, env)
                yield from (address.password, address.sentinel_password)
    for path in filter(None, files):
        with suppress(OSError):
            for line in _beginning(path).decode(errors="replace").splitlines():
                yield from (*_forms(line), *passwords_in(line))
                name, equals, value = line.partition("=")  # of an ini file
                if equals and _SECRET_NAME.search(name.strip()):
                    yield from _forms(value)


def _forms(value: str) -> Iterator[str]:
    value = value.strip()
    yield value
    yield value.removeprefix(KEY_PREFIX)


def _beginning(path: str) -> bytes:
    """O_NONBLOCK: a fifo without a writer must not block. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(SECRETS_BYTES_MAX) or b""

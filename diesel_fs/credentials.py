"""The credentials of a server's user: the name, and the key that proves it.

A key is the seed of an Ed25519 key (RFC 8032): 32 bytes, written as `diesel-key-1:` and base64. No
`repr` or `str` shows a key. A server has only the public keys of its users (`storage/accounts/`).
Pure.
"""

import binascii
from base64 import b64decode, b64encode
from dataclasses import dataclass, field

from .errors import ConfigError

KEY_BYTES = 32
PUBLIC_KEY_BYTES = 32
KEY_PREFIX = "diesel-key-1:"


@dataclass(frozen=True, slots=True)
class Credentials:
    user: str
    seed: bytes = field(repr=False)

    @property
    def key_text(self) -> str:
        """This text is secret."""
        return key_text(self.seed)


def key_text(seed: bytes) -> str:
    return KEY_PREFIX + b64encode(seed).decode()


def parse_key(text: str) -> bytes:
    """The seed in a key's text; white space around it is ignored. Raises ConfigError with a message
    that repeats nothing of the text."""
    stripped = text.strip()
    try:
        seed = b64decode(stripped.removeprefix(KEY_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        seed = b""
    if not stripped.startswith(KEY_PREFIX) or len(seed) != KEY_BYTES:
        raise ConfigError("the text is not a key", advice=f"a key is one line, {KEY_PREFIX}...")
    return seed


def no_user_named(url: object) -> ConfigError:
    """To be raised before connecting to a server for which no user is named."""
    return ConfigError(
        f"{url} is the address of a server, and no user is named",
        advice="name a user by --user and --key-file (or DIESEL_USER and DIESEL_KEY), or use the"
        " address of a repository without a server, such as file:///folder",
    )

"""Who a client says it is: a user's name and the key that proves it.

Owned here: how a key is written, and that nothing shows one: `repr` and `str` leave it out. Not
owned: signing (`net/client.py`), which keys a server knows (`accounts.py`). Pure.

A key is the seed of an Ed25519 key (RFC 8032): 32 bytes, written as `diesel-key-1:` and base64.
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
    """A user's name and the seed of its key."""

    user: str
    seed: bytes = field(repr=False)

    @property
    def key_text(self) -> str:
        """The key as it is written. Not to be shown."""
        return key_text(self.seed)


def key_text(seed: bytes) -> str:
    """A key as it is written."""
    return KEY_PREFIX + b64encode(seed).decode()


def parse_key(text: str) -> bytes:
    """The seed of a key as it was written; space around it does not matter.

    Raises ConfigError, whose words say nothing of the text.
    """
    stripped = text.strip()
    try:
        seed = b64decode(stripped.removeprefix(KEY_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        seed = b""
    if not stripped.startswith(KEY_PREFIX) or len(seed) != KEY_BYTES:
        raise ConfigError("this is no key", advice=f"a key is one line, {KEY_PREFIX}...")
    return seed


def no_user_named(where: object) -> ConfigError:
    """The error of a server's address without an account. Nothing has been sent there yet."""
    return ConfigError(
        f"{where} is the address of a server, and no user is named",
        advice="name one by --user and --key-file (or DIESEL_USER and DIESEL_KEY), or use the"
        " address of a repository without a server, such as file:///folder",
    )

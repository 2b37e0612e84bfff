"""Keys of users: made, and used. Ed25519 (RFC 8032) by the library `cryptography`.

Owned here: what is done with keys. Not owned: how they are written (`credentials.py` for secret
ones, `accounts.py` for public ones), what is signed (`wire.py`). A key is its seed, 32 bytes; it
never stands in an error. Stateless.

The library is imported when it is first used: that takes a twentieth of a second, and most programs
sign nothing.
"""

import os

from ..credentials import KEY_BYTES, PUBLIC_KEY_BYTES


def new_seed() -> bytes:
    """A new key."""
    return os.urandom(KEY_BYTES)


def public_key(seed: bytes) -> bytes:
    """The public key that belongs to a key."""
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  # see the module

    return ed25519.Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(seed: bytes, content: bytes) -> bytes:
    """The signature of `content`, 64 bytes."""
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    return ed25519.Ed25519PrivateKey.from_private_bytes(seed).sign(content)


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the holder of the key signed `content`. Any bytes are True or False."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    if len(public) != PUBLIC_KEY_BYTES:
        return False
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True

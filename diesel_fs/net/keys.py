"""Makes and uses the keys of users: Ed25519 (RFC 8032), by the library `cryptography`.

A secret key is kept as its seed of 32 bytes; no error contains one. The import of the library takes
50 ms and most programs sign nothing, so it happens at the first use.
"""

import os

from ..credentials import KEY_BYTES, PUBLIC_KEY_BYTES


def new_seed() -> bytes:
    return os.urandom(KEY_BYTES)


def public_key(seed: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    return ed25519.Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(seed: bytes, content: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    return ed25519.Ed25519PrivateKey.from_private_bytes(seed).sign(content)


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Never raises."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    if len(public) != PUBLIC_KEY_BYTES:
        return False
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True

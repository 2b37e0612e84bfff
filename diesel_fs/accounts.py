"""Accounts: users, their public keys, and who may do what with which dataset.

Owned here: roles and what they allow. Not owned: where accounts are kept (`storage/accounts.py`),
secrets (there are none here). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Role(IntEnum):
    """What a user may do with a dataset; a greater one may do all that a smaller one may."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Account:
    """A user: name, Ed25519 public key (32 bytes), and roles by the names of datasets.

    `admin`: of all datasets, those that are not there yet too, and of all accounts.
    """

    name: str
    public_key: bytes
    admin: bool = False
    grants: Mapping[str, Role] = field(default_factory=dict)

    def role(self, dataset: str) -> Role:
        """What the user may do with a dataset of this name."""
        return Role.ADMIN if self.admin else self.grants.get(dataset, Role.NONE)

"""Accounts: users, their public keys, and who may do what with which dataset.

Owned here: roles and what they allow, what a change does to the accounts, which names and public
keys are any, and accounts as text (of exports, of tables). Not owned: where accounts are kept
(`store.py`), secrets (there are none here). Pure.

As text, accounts are lines of JSON: `{"diesel-accounts": 1}`, then one line for each user.
"""

import binascii
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ...credentials import PUBLIC_KEY_BYTES
from ...errors import (
    ConflictError,
    CorruptError,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from ...names import check_dataset_name

PUBLIC_KEY_PREFIX = "diesel-public-1:"
TEXT_VERSION = 1
TEXT_BYTES_MAX = 64 << 20
ACCOUNTS_MAX = 1 << 16
GRANTS_MAX = 1 << 12

_USER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_MARK = "diesel-accounts"

# The curve of Ed25519 (RFC 8032, 5.1), as far as telling keys from other bytes needs it
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_Y_OF_ORDER_8 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SMALL_ORDER = frozenset({0, 1, _P - 1, _Y_OF_ORDER_8, _P - _Y_OF_ORDER_8})


class Role(IntEnum):
    """What a user may do with a dataset; a greater one may do all that a smaller one may."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def text(self) -> str:
        """As people write it."""
        return self.name.lower()


ROLES: Mapping[str, Role] = {role.text: role for role in Role}


@dataclass(frozen=True, slots=True)
class Account:
    """A user: name, Ed25519 public key (32 bytes), and roles by the names of datasets.

    `admin`: of all datasets, those that are not there yet too, and of all accounts. `ceiling`: no
    role is greater, while nobody can tell whether this still is the user's account.
    """

    name: str
    public_key: bytes
    admin: bool = False
    grants: Mapping[str, Role] = field(default_factory=dict)
    ceiling: Role = Role.ADMIN

    def role(self, dataset: str) -> Role:
        """What the user may do with a dataset of this name."""
        return min(self._granted(dataset), self.ceiling)

    def _granted(self, dataset: str) -> Role:
        return Role.ADMIN if self.admin else self.grants.get(dataset, Role.NONE)

    def require(self, dataset: str, role: Role) -> None:
        """Raises NoSuchDataset for who may not even read it, PermissionDenied for who may do less,
        MetadataError where that cannot be told now. All by the name alone: whether there is such
        a dataset makes no difference.
        """
        if self._granted(dataset) is Role.NONE:
            raise NoSuchDataset(f"no dataset {dataset!r}")
        if self._granted(dataset) < role:
            raise PermissionDenied(
                f"{self.name!r} may not {_ROLE_VERBS[role]} the dataset {dataset!r}",
                advice=f"its administrator can: dlcmd grant {dataset} {self.name} {role.text}",
            )
        self._check_ceiling(role)

    def require_admin(self) -> None:
        """Raises PermissionDenied for who is no administrator of all, MetadataError as above."""
        if not self.admin:
            raise PermissionDenied(f"{self.name!r} is no administrator of accounts")
        self._check_ceiling(Role.ADMIN)

    def _check_ceiling(self, role: Role) -> None:
        if role > self.ceiling:
            raise MetadataError(
                "the accounts cannot be looked up: until then there is only reading",
                advice="try again later",
            )


_ROLE_VERBS = {Role.NONE: "see", Role.READ: "read", Role.WRITE: "change", Role.ADMIN: "administer"}

Accounts = Mapping[str, Account]
"""By name."""


# Names and keys


def check_user_name(name: str) -> str:
    """`name` itself. Raises UsageError."""
    if not _USER_NAME.fullmatch(name):
        raise UsageError(
            f"bad user name {name[:64]!r}",
            advice="a name is a small letter or digit, then up to 31 of those, '.', '_' or '-'",
        )
    return name


def parse_role(text: str) -> Role:
    """The role of that name. Raises UsageError."""
    if text not in ROLES:
        raise UsageError(f"no role is called {text[:64]!r}", advice=f"there are {', '.join(ROLES)}")
    return ROLES[text]


def check_public_key(public: bytes) -> bytes:
    """`public` itself. Raises UsageError for bytes that are no key, or one that anybody can sign
    for (a point of small order).
    """
    if len(public) != PUBLIC_KEY_BYTES:
        raise UsageError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public)}")
    y = (int.from_bytes(public, "little") & (1 << 255) - 1) % _P
    square = (y * y - 1) * (_D * y * y + 1)  # times a square it is x * x
    if y in _SMALL_ORDER or pow(square, (_P - 1) // 2, _P) != 1:
        raise UsageError("these bytes are no public key")
    return public


def public_key_text(public: bytes) -> str:
    """A public key as it is written."""
    return PUBLIC_KEY_PREFIX + b64encode(public).decode()


def parse_public_key(text: str) -> bytes:
    """The public key that was written; space around it does not matter. Raises UsageError."""
    stripped = text.strip()
    try:
        public = b64decode(stripped.removeprefix(PUBLIC_KEY_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        public = b""
    if not stripped.startswith(PUBLIC_KEY_PREFIX) or len(public) != PUBLIC_KEY_BYTES:
        # A key that is secret may have been given by mistake, so nothing of the text is repeated.
        raise UsageError("this is no public key", advice=f"it is one line, {PUBLIC_KEY_PREFIX}...")
    return check_public_key(public)


# Changes: each gives the accounts as they are afterwards


def with_account(accounts: Accounts, account: Account) -> Accounts:
    """With a new account. Raises ConflictError where there is one of that name."""
    if account.name in accounts:
        raise ConflictError(f"there is a user {account.name!r} already", advice="user add --renew")
    return _checked({**accounts, account.name: account})


def with_new_key(accounts: Accounts, name: str, public_key: bytes, *, admin: bool) -> Accounts:
    """With another key for an account, whose roles stay; `admin` may be given, not taken.

    Raises NotFoundError.
    """
    account = _existing(accounts, name)
    changed = replace(account, public_key=public_key, admin=account.admin or admin)
    return _checked({**accounts, name: changed})


def without_account(accounts: Accounts, name: str) -> Accounts:
    """Without an account. Raises NotFoundError."""
    _existing(accounts, name)
    return {other: account for other, account in accounts.items() if other != name}


def with_role(accounts: Accounts, name: str, dataset: str, role: Role) -> Accounts:
    """With a role for a user; NONE takes the one there away. Raises NotFoundError."""
    account = _existing(accounts, name)
    grants = {each: given for each, given in account.grants.items() if each != dataset}
    if role is not Role.NONE:
        grants[dataset] = role
    return _checked({**accounts, name: replace(account, grants=grants)})


def with_accounts(accounts: Accounts, more: Iterable[Account]) -> Accounts:
    """With accounts that replace those of the same names."""
    return _checked({**accounts, **{account.name: account for account in more}})


def check_admin_left(before: Accounts, after: Accounts) -> None:
    """Raises ConflictError where nobody could administer accounts any more."""
    if any(each.admin for each in before.values()) and not any(
        each.admin for each in after.values()
    ):
        raise ConflictError(
            "this would leave no administrator",
            advice="add another first: dlcmd user add NAME --admin",
        )


def _existing(accounts: Accounts, name: str) -> Account:
    account = accounts.get(name)
    if account is None:
        raise NotFoundError(f"there is no user {name!r}")
    return account


def _checked(accounts: Accounts) -> Accounts:
    if len(accounts) > ACCOUNTS_MAX:
        raise UsageError(f"more than {ACCOUNTS_MAX:,} users")
    for account in accounts.values():
        if len(account.grants) > GRANTS_MAX:
            raise UsageError(f"more than {GRANTS_MAX:,} roles for the user {account.name!r}")
    return accounts


# Text


def accounts_text(accounts: Accounts) -> str:
    """All accounts as text, by name. Roles and public keys, so it gives nobody a way in."""
    lines = [json.dumps({_MARK: TEXT_VERSION})]
    lines += [account_line(accounts[name]) for name in sorted(accounts)]
    return "\n".join(lines) + "\n"


def parse_accounts(content: bytes) -> Accounts:
    """The accounts in a text. Raises CorruptError, which names the line; NewerVersionError."""
    if len(content) > TEXT_BYTES_MAX:
        raise CorruptError(f"accounts of {len(content):,} bytes (at most {TEXT_BYTES_MAX:,})")
    try:
        lines: Sequence[str] = content.decode().splitlines()
    except UnicodeDecodeError:
        raise CorruptError("no accounts: it is no text") from None
    first = _fields(lines[0] if lines else "", "line 1")
    version = first.get(_MARK)
    if type(version) is not int or version < 1:
        raise CorruptError(
            f"no accounts: the first line is not {json.dumps({_MARK: TEXT_VERSION})}"
        )
    if version > TEXT_VERSION:
        raise NewerVersionError(
            f"accounts of version {version}, and this program knows {TEXT_VERSION}",
            advice="use a newer diesel-fs",
        )
    if len(first) != 1 or len(lines) > ACCOUNTS_MAX + 1:
        raise CorruptError("no accounts: the first line holds more, or there are too many lines")
    found: dict[str, Account] = {}
    for number, line in enumerate(lines[1:], start=2):
        account = parse_account(line, f"line {number}")
        if account.name in found:
            raise CorruptError(f"line {number}: the user {account.name!r} stands there twice")
        found[account.name] = account
    return found


def account_line(account: Account) -> str:
    """One account as a line of text."""
    return json.dumps(
        {
            "user": account.name,
            "public_key": public_key_text(account.public_key),
            "admin": account.admin,
            "grants": {dataset: account.grants[dataset].text for dataset in sorted(account.grants)},
        }
    )


def parse_account(line: str | bytes, where: str) -> Account:
    """The account of a line. Raises CorruptError, which says `where`."""
    fields = _fields(line, where)
    if set(fields) != {"user", "public_key", "admin", "grants"}:
        raise CorruptError(f"{where}: an account has user, public_key, admin and grants")
    name, public, admin, grants = (fields[key] for key in ("user", "public_key", "admin", "grants"))
    if not (type(name) is str and type(public) is str and type(admin) is bool):
        raise CorruptError(f"{where}: a field of another type")
    if type(grants) is not dict or len(grants) > GRANTS_MAX:
        raise CorruptError(f"{where}: grants are a map of at most {GRANTS_MAX:,} roles")
    try:
        return Account(
            check_user_name(name),
            parse_public_key(public),
            admin,
            {
                check_dataset_name(dataset): _parse_granted_role(role)
                for dataset, role in grants.items()
            },
        )
    except UsageError as error:
        raise CorruptError(f"{where}: {error.message}") from None


def _parse_granted_role(role: object) -> Role:
    if type(role) is not str or role == Role.NONE.text:
        raise UsageError("a role is read, write or admin")
    return parse_role(role)


def _fields(line: str | bytes, where: str) -> dict[str, object]:
    try:
        found: object = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptError(f"{where}: no account: it is no map in JSON")
    return found


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a repeated key")
    return found

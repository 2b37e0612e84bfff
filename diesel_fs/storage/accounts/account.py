"""Users, their public keys and their roles for datasets, and their text for exports and tables.
Pure.

The text is lines of JSON: first `{"diesel-accounts": 1}`, then one line for each user. It holds no
secrets.
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
_FIRST_LINE_KEY = "diesel-accounts"

# Parameters of the curve of Ed25519 (RFC 8032, 5.1), to tell keys from other bytes: the field's
# prime, the constant d, and the coordinates y of all points of small order
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_Y_OF_ORDER_8 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SMALL_ORDER = frozenset({0, 1, _P - 1, _Y_OF_ORDER_8, _P - _Y_OF_ORDER_8})


class Role(IntEnum):
    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def text(self) -> str:
        return self.name.lower()


ROLES: Mapping[str, Role] = {role.text: role for role in Role}


@dataclass(frozen=True, slots=True)
class Account:
    """A user: an Ed25519 public key (32 bytes), and roles by the names of datasets.

    An `admin` has the role ADMIN for all datasets, future ones too, and may change accounts. No
    role exceeds `ceiling`. A server lowers it while it cannot read the table of accounts, because
    the account may have been changed meanwhile.
    """

    name: str
    public_key: bytes
    admin: bool = False
    grants: Mapping[str, Role] = field(default_factory=dict)
    ceiling: Role = Role.ADMIN

    def role(self, dataset: str) -> Role:
        return min(self._granted(dataset), self.ceiling)

    def _granted(self, dataset: str) -> Role:
        return Role.ADMIN if self.admin else self.grants.get(dataset, Role.NONE)

    def require(self, dataset: str, role: Role) -> None:
        """Check that the user has a role for a dataset.

        Raises NoSuchDataset if the user may not even read it, PermissionDenied if the role is too
        small, MetadataError if only `ceiling` makes it too small. The dataset's existence is not
        checked, so that users cannot find it out.
        """
        if self._granted(dataset) is Role.NONE:
            raise NoSuchDataset(f"no dataset {dataset!r}")
        if self._granted(dataset) < role:
            raise PermissionDenied(
                f"{self.name!r} may not {_ROLE_VERBS[role]} the dataset {dataset!r}",
                advice=f"an administrator can run: dlcmd grant {dataset} {self.name} {role.text}",
            )
        self._check_ceiling(role)

    def require_admin(self) -> None:
        """Raises PermissionDenied, or MetadataError as `require`."""
        if not self.admin:
            raise PermissionDenied(f"{self.name!r} may not change accounts")
        self._check_ceiling(Role.ADMIN)

    def _check_ceiling(self, role: Role) -> None:
        if role > self.ceiling:
            raise MetadataError(
                "the accounts cannot be read now, so only reading is allowed",
                advice="try again later",
            )


_ROLE_VERBS = {Role.NONE: "see", Role.READ: "read", Role.WRITE: "change", Role.ADMIN: "administer"}

Accounts = Mapping[str, Account]


# Names and keys


def check_user_name(name: str) -> str:
    if not _USER_NAME.fullmatch(name):
        raise UsageError(
            f"bad user name {name[:64]!r}",
            advice="use a small letter or digit, then up to 31 of those, '.', '_' or '-'",
        )
    return name


def parse_role(text: str) -> Role:
    if text not in ROLES:
        raise UsageError(f"there is no role {text[:64]!r}", advice=f"use {', '.join(ROLES)}")
    return ROLES[text]


def check_public_key(public: bytes) -> bytes:
    """Return the key. Raises UsageError for bytes that are no key, and for points of small order,
    for which anybody can make signatures."""
    if len(public) != PUBLIC_KEY_BYTES:
        raise UsageError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public)}")
    y = (int.from_bytes(public, "little") & (1 << 255) - 1) % _P
    # On the curve this is x * x * (d * y * y + 1)**2, so it is a square if there is an x for y
    square = (y * y - 1) * (_D * y * y + 1)
    if y in _SMALL_ORDER or pow(square, (_P - 1) // 2, _P) != 1:
        raise UsageError("these bytes are not a public key")
    return public


def public_key_text(public: bytes) -> str:
    return PUBLIC_KEY_PREFIX + b64encode(public).decode()


def parse_public_key(text: str) -> bytes:
    """Inverse of `public_key_text`; ignores space around the text. Raises UsageError."""
    stripped = text.strip()
    try:
        public = b64decode(stripped.removeprefix(PUBLIC_KEY_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        public = b""
    if not stripped.startswith(PUBLIC_KEY_PREFIX) or len(public) != PUBLIC_KEY_BYTES:
        # The message does not repeat the text: it may be a secret key, given by mistake
        raise UsageError(
            "this is not a public key", advice=f"a public key is one line: {PUBLIC_KEY_PREFIX}..."
        )
    return check_public_key(public)


# Changes: each function returns changed accounts, and leaves its argument as it is


def with_account(accounts: Accounts, account: Account) -> Accounts:
    if account.name in accounts:
        raise ConflictError(
            f"there is a user {account.name!r} already",
            advice="for a new key use: dlcmd user add --renew",
        )
    return _checked({**accounts, account.name: account})


def with_new_key(accounts: Accounts, name: str, public_key: bytes, *, admin: bool) -> Accounts:
    """Replace a key; the roles stay. `admin` makes the user an administrator. Raises
    NotFoundError."""
    account = _existing(accounts, name)
    changed = replace(account, public_key=public_key, admin=account.admin or admin)
    return _checked({**accounts, name: changed})


def without_account(accounts: Accounts, name: str) -> Accounts:
    _existing(accounts, name)
    return {other: account for other, account in accounts.items() if other != name}


def with_role(accounts: Accounts, name: str, dataset: str, role: Role) -> Accounts:
    """Give a user a role; NONE removes it. Raises NotFoundError."""
    account = _existing(accounts, name)
    grants = {each: given for each, given in account.grants.items() if each != dataset}
    if role is not Role.NONE:
        grants[dataset] = role
    return _checked({**accounts, name: replace(account, grants=grants)})


def with_accounts(accounts: Accounts, more: Iterable[Account]) -> Accounts:
    return _checked({**accounts, **{account.name: account for account in more}})


def check_admin_left(before: Accounts, after: Accounts) -> None:
    """Raise ConflictError if a change removes the last administrator."""
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
    lines = [json.dumps({_FIRST_LINE_KEY: TEXT_VERSION})]
    lines += [account_line(accounts[name]) for name in sorted(accounts)]
    return "\n".join(lines) + "\n"


def parse_accounts(content: bytes) -> Accounts:
    """Inverse of `accounts_text`. Raises CorruptError with the number of the line,
    NewerVersionError."""
    if len(content) > TEXT_BYTES_MAX:
        raise CorruptError(
            f"a text of accounts has {len(content):,} bytes (at most {TEXT_BYTES_MAX:,})"
        )
    try:
        lines: Sequence[str] = content.decode().splitlines()
    except UnicodeDecodeError:
        raise CorruptError("not a text of accounts: it is not UTF-8") from None
    first = _fields(lines[0] if lines else "", "line 1")
    version = first.get(_FIRST_LINE_KEY)
    if type(version) is not int or version < 1:
        raise CorruptError(
            "not a text of accounts: the first line is not"
            f" {json.dumps({_FIRST_LINE_KEY: TEXT_VERSION})}"
        )
    if version > TEXT_VERSION:
        raise NewerVersionError(
            f"the accounts have version {version}, and this program knows {TEXT_VERSION}",
            advice="use a newer diesel-fs",
        )
    if len(first) != 1 or len(lines) > ACCOUNTS_MAX + 1:
        raise CorruptError(
            "not a text of accounts: the first line has other keys, or there are too many lines"
        )
    found: dict[str, Account] = {}
    for number, line in enumerate(lines[1:], start=2):
        account = parse_account(line, f"line {number}")
        if account.name in found:
            raise CorruptError(f"line {number}: there are two accounts of {account.name!r}")
        found[account.name] = account
    return found


def account_line(account: Account) -> str:
    return json.dumps(
        {
            "user": account.name,
            "public_key": public_key_text(account.public_key),
            "admin": account.admin,
            "grants": {dataset: account.grants[dataset].text for dataset in sorted(account.grants)},
        }
    )


def parse_account(line: str | bytes, where: str) -> Account:
    """Inverse of `account_line`. Raises CorruptError with `where` in its message."""
    fields = _fields(line, where)
    if set(fields) != {"user", "public_key", "admin", "grants"}:
        raise CorruptError(f"{where}: the keys are not user, public_key, admin and grants")
    name, public, admin, grants = (fields[key] for key in ("user", "public_key", "admin", "grants"))
    if not (type(name) is str and type(public) is str and type(admin) is bool):
        raise CorruptError(f"{where}: a value has the wrong type")
    if type(grants) is not dict or len(grants) > GRANTS_MAX:
        raise CorruptError(f"{where}: grants is not a map of at most {GRANTS_MAX:,} roles")
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
        raise CorruptError(f"{where}: not a map in JSON")
    return found


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a repeated key")
    return found

"""Administers accounts: by direct access to the repository, or through a server.

Each change is checked and made in one atomic step, so a lost right cannot be used any more, and
after a change through a server at least one user can administer. Any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from ..credentials import Credentials, no_user_named
from ..errors import PermissionDenied
from ..format.entries import Bytes
from ..names import check_dataset_name
from ..net.client import Answer, ServerLink
from ..net.messages import Message
from ..storage.accounts.account import (
    Account,
    Accounts,
    Role,
    accounts_text,
    check_admin_left,
    check_public_key,
    check_user_name,
    parse_accounts,
    with_account,
    with_accounts,
    with_new_key,
    with_role,
    without_account,
)
from ..storage.accounts.store import AccountTable
from ..storage.open_stores import check_accounts_place, open_accounts, open_objects
from ..urls import SERVER_SCHEMES, RepositoryUrl


class Administration(ABC):
    """The operations on the accounts of a repository; `storage/accounts/account.py` defines their
    effects.

    All methods raise PermissionDenied; UsageError for a bad name or key; NotFoundError for a
    missing user, ConflictError for an existing one, or if nobody would be left to administer;
    MetadataError.
    """

    @abstractmethod
    def export_text(self) -> bytes:
        """All accounts, as text."""

    @abstractmethod
    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        """An `admin` may administer the whole repository."""

    @abstractmethod
    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        """Roles stay; `admin` can be given, not taken away."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a user."""

    @abstractmethod
    def grant(self, dataset: str, name: str, role: Role) -> None:
        """Set a user's role on a dataset; NONE takes it away."""

    @abstractmethod
    def import_text(self, text: bytes, *, replace: bool) -> None:
        """Add all accounts of an exported text, or none; `replace` removes all other accounts.
        Raises CorruptError, NewerVersionError."""

    @abstractmethod
    def close(self) -> None:
        """Repeatable."""

    def accounts(self) -> Accounts:
        return parse_accounts(self.export_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DirectAdministration(Administration):
    """Acts with the rights of `actor`, or with all rights (None) for a process with direct access
    to the repository."""

    def __init__(self, table: AccountTable, actor: Account | None = None) -> None:
        self._table = table
        self._actor = actor

    def export_text(self) -> bytes:
        self._check(self._actor)
        accounts = self._table.read().accounts
        self._check(self._current_actor(accounts))
        return accounts_text(accounts).encode()

    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._check(self._actor)
        account = Account(check_user_name(name), check_public_key(public_key), admin)
        self._change(lambda accounts: with_account(accounts, account))

    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._check(self._actor)
        check_user_name(name)
        check_public_key(public_key)
        self._change(lambda accounts: with_new_key(accounts, name, public_key, admin=admin))

    def remove(self, name: str) -> None:
        self._check(self._actor)
        check_user_name(name)
        self._change(lambda accounts: without_account(accounts, name))

    def grant(self, dataset: str, name: str, role: Role) -> None:
        check_dataset_name(dataset)
        self._check(self._actor, dataset)
        check_user_name(name)
        self._change(lambda accounts: with_role(accounts, name, dataset, role), dataset)

    def import_text(self, text: bytes, *, replace: bool) -> None:
        self._check(self._actor)
        more = parse_accounts(text).values()
        self._change(lambda accounts: with_accounts({} if replace else accounts, more))

    def close(self) -> None:
        self._table.close()

    def _change(self, edit: Callable[[Accounts], Accounts], dataset: str = "") -> None:
        def edit_if_allowed(before: Accounts) -> Accounts:
            self._check(self._current_actor(before), dataset)
            after = edit(before)
            if self._actor is not None:
                check_admin_left(before, after)
            return after

        self._table.change(edit_if_allowed)

    @staticmethod
    def _check(actor: Account | None, dataset: str = "") -> None:
        """An empty `dataset` stands for the repository."""
        if actor is not None and dataset:
            actor.require(dataset, Role.ADMIN)
        elif actor is not None:
            actor.require_admin()

    def _current_actor(self, accounts: Accounts) -> Account | None:
        if self._actor is None:
            return None
        account = accounts.get(self._actor.name)
        if account is None or account.public_key != self._actor.public_key:
            raise PermissionDenied(f"the account {self._actor.name!r} is not valid any more")
        return account


class Calls(Protocol):
    def call(
        self, message: Message, payload: Sequence[Bytes] = (), *, may_repeat: bool = True
    ) -> Answer: ...

    def close(self) -> None: ...


class RemoteAdministration(Administration):
    """The server knows the sender from the login."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def export_text(self) -> bytes:
        return bytes(self._calls.call({"do": "users"}).payload)

    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._set(name, public_key, admin=admin, new=True)

    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._set(name, public_key, admin=admin, new=False)

    def _set(self, name: str, public_key: bytes, *, admin: bool, new: bool) -> None:
        self._send_change(
            {"do": "set_user", "user": name, "public_key": public_key, "admin": admin, "new": new}
        )

    def remove(self, name: str) -> None:
        self._send_change({"do": "remove_user", "user": name})

    def grant(self, dataset: str, name: str, role: Role) -> None:
        self._send_change({"do": "grant", "dataset": dataset, "user": name, "role": role.text})

    def import_text(self, text: bytes, *, replace: bool) -> None:
        self._send_change({"do": "import_users", "replace": replace}, text)

    def _send_change(self, message: Message, payload: Bytes = b"") -> None:
        # Not repeated: the second attempt would report that a successful change failed
        self._calls.call(message, [payload] if payload else [], may_repeat=False)

    def close(self) -> None:
        self._calls.close()


def open_administration(
    url: RepositoryUrl, credentials: Credentials | None, *, create: bool = False
) -> Administration:
    """`create` makes a missing repository if possible. Raises ConfigError, ObjectStoreError,
    MetadataError."""
    if url.scheme not in SERVER_SCHEMES:
        check_accounts_place(url)
        return DirectAdministration(open_accounts(url, open_objects(url, create=create)))
    if credentials is None:
        raise no_user_named(url)
    return RemoteAdministration(ServerLink(url, credentials))

"""Administering accounts: by direct access to the repository, or through a server.

Owned here: which changes there are, who may make them, and that none made through a server leaves
nobody to administer. Not owned: what a change means (`accounts.py`), where accounts are kept
(`storage/accounts/store.py`). Keys are made by whoever calls this: only public ones come here.

Whether somebody may make a change is decided on the accounts that it changes, in the same atomic
step, so who has just lost a right cannot use it. Safe from many threads.
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
    """What may be done with the accounts of a repository.

    Errors, of all methods: PermissionDenied, UsageError for what is no name or key, NotFoundError
    and ConflictError for users that are not there, or are; ConflictError where nobody would be left
    to administer; MetadataError.
    """

    @abstractmethod
    def export_text(self) -> bytes:
        """All accounts, as text."""

    @abstractmethod
    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        """A new user."""

    @abstractmethod
    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        """Another key for a user, whose roles stay; `admin` may be given, not taken."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a user."""

    @abstractmethod
    def grant(self, dataset: str, name: str, role: Role) -> None:
        """Give a user a role, in place of the one that was; NONE takes it away."""

    @abstractmethod
    def import_text(self, text: bytes, *, replace: bool) -> None:
        """Take over accounts from a text, all of them or none; `replace` removes all others.

        Raises CorruptError, NewerVersionError.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open. Repeatable."""

    def accounts(self) -> Accounts:
        """All accounts."""
        return parse_accounts(self.export_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DirectAdministration(Administration):
    """On the table itself: as `actor`, or, for who has direct access, with all rights."""

    def __init__(self, table: AccountTable, actor: Account | None = None) -> None:
        self._table = table
        self._asker = actor

    def export_text(self) -> bytes:
        self._check(self._asker)
        accounts = self._table.read().accounts
        self._check(self._current_actor(accounts))
        return accounts_text(accounts).encode()

    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._check(self._asker)
        account = Account(check_user_name(name), check_public_key(public_key), admin)
        self._change(lambda accounts: with_account(accounts, account))

    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._check(self._asker)
        check_user_name(name)
        check_public_key(public_key)
        self._change(lambda accounts: with_new_key(accounts, name, public_key, admin=admin))

    def remove(self, name: str) -> None:
        self._check(self._asker)
        check_user_name(name)
        self._change(lambda accounts: without_account(accounts, name))

    def grant(self, dataset: str, name: str, role: Role) -> None:
        check_dataset_name(dataset)
        self._check(self._asker, dataset)
        check_user_name(name)
        self._change(lambda accounts: with_role(accounts, name, dataset, role), dataset)

    def import_text(self, text: bytes, *, replace: bool) -> None:
        self._check(self._asker)
        more = parse_accounts(text).values()
        self._change(lambda accounts: with_accounts({} if replace else accounts, more))

    def close(self) -> None:
        self._table.close()

    def _change(self, edit: Callable[[Accounts], Accounts], dataset: str = "") -> None:
        def allowed(before: Accounts) -> Accounts:
            self._check(self._current_actor(before), dataset)
            after = edit(before)
            if self._asker is not None:
                check_admin_left(before, after)
            return after

        self._table.change(allowed)

    @staticmethod
    def _check(asker: Account | None, dataset: str = "") -> None:
        """Raises PermissionDenied, NoSuchDataset, MetadataError where `actor` may not."""
        if asker is not None and dataset:
            asker.require(dataset, Role.ADMIN)
        elif asker is not None:
            asker.require_admin()

    def _current_actor(self, accounts: Accounts) -> Account | None:
        """Who asks, as the table has it; None for direct access."""
        if self._asker is None:
            return None
        found = accounts.get(self._asker.name)
        if found is None or found.public_key != self._asker.public_key:
            raise PermissionDenied(f"the account {self._asker.name!r} is not valid any more")
        return found


class Calls(Protocol):
    """What is asked of a server (`rpc.Calls`)."""

    def call(
        self, message: Message, payload: Sequence[Bytes] = (), *, may_repeat: bool = True
    ) -> Answer: ...

    def close(self) -> None: ...


class RemoteAdministration(Administration):
    """Through a server, which asks who we are."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def export_text(self) -> bytes:
        return bytes(self._calls.call({"do": "users"}).payload)

    def add(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._set(name, public_key, admin=admin, new=True)

    def replace_key(self, name: str, public_key: bytes, *, admin: bool) -> None:
        self._set(name, public_key, admin=admin, new=False)

    def _set(self, name: str, public_key: bytes, *, admin: bool, new: bool) -> None:
        self._tell(
            {"do": "set_user", "user": name, "public_key": public_key, "admin": admin, "new": new}
        )

    def remove(self, name: str) -> None:
        self._tell({"do": "remove_user", "user": name})

    def grant(self, dataset: str, name: str, role: Role) -> None:
        self._tell({"do": "grant", "dataset": dataset, "user": name, "role": role.text})

    def import_text(self, text: bytes, *, replace: bool) -> None:
        self._tell({"do": "import_users", "replace": replace}, text)

    def _tell(self, message: Message, payload: Bytes = b"") -> None:
        # Not sent again: what was carried out once would then seem to fail.
        self._calls.call(message, [payload] if payload else [], may_repeat=False)

    def close(self) -> None:
        self._calls.close()


def open_administration(
    url: RepositoryUrl, credentials: Credentials | None, *, create: bool = False
) -> Administration:
    """The accounts of the repository at an address; `create` makes a repository where there is
    none and that can be made. Raises ConfigError, ObjectStoreError, MetadataError.
    """
    if url.scheme not in SERVER_SCHEMES:
        check_accounts_place(url)
        return DirectAdministration(open_accounts(url, open_objects(url, create=create)))
    if credentials is None:
        raise no_user_named(url)
    return RemoteAdministration(ServerLink(url, credentials))

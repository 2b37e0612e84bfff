"""A table of accounts in memory, and users with keys."""

import threading
from collections.abc import Callable

from diesel_fs.net import keys
from diesel_fs.storage.accounts.account import (
    Account,
    Accounts,
    Role,
    with_accounts,
    without_account,
)
from diesel_fs.storage.accounts.store import NO_TOKEN, AccountState, AccountTable


class MemoryTable(AccountTable):
    """Accounts in memory; `fault` is raised by every call, and calls are counted."""

    def __init__(self, *accounts: Account) -> None:
        self.accounts: Accounts = {account.name: account for account in accounts}
        self.fault: Exception | None = None
        self.tokens = 0
        self.reads = 0
        self.gate: threading.Event | None = None
        self._state = 1 if accounts else 0
        self._lock = threading.Lock()

    def put(self, account: Account) -> None:
        self.change(lambda accounts: with_accounts(accounts, [account]))

    def remove(self, name: str) -> None:
        self.change(lambda accounts: without_account(accounts, name))

    def lose(self) -> None:
        """Lose all accounts, like a Redis that comes back without data."""
        self.accounts, self._state = {}, 0

    def read(self) -> AccountState:
        self.reads += 1
        return AccountState(self.token(), self.accounts)

    def token(self) -> bytes:
        self.tokens += 1
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        return b"%d" % self._state if self._state else NO_TOKEN

    def change(self, edit: Callable[[Accounts], Accounts]) -> Accounts:
        with self._lock:
            if self.fault is not None:
                raise self.fault
            self.accounts, self._state = edit(self.accounts), self._state + 1
            return self.accounts

    def close(self) -> None:
        pass


def seed(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


def account(name: str, *, admin: bool = False, **grants: Role) -> Account:
    return Account(name, keys.public_key(seed(name)), admin, grants)

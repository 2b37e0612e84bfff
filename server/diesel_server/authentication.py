"""Who may come in, and who still may: logins against the table of accounts.

Owned here: checking logins, limits on those that fail, and how old what is known of the accounts
may be. Not owned: the handshake (`connection.py`), roles (`accounts.py`), the table
(`storage/accounts/store.py`).

A login is checked against a table that was read after it had arrived. Who is logged in is looked up
again and again in a copy that is at most `REFRESH_S` old: so long a user that has been removed, or
whose key or role has, goes on.

Where the table cannot be read, nobody is let in but whom the copy knows, and after `ROLES_S` for
reading alone (`Account.ceiling`); after `COPY_S` nobody. A table that has been lost (Redis came
back without data) lets nobody in; who is logged in may read, as above: an empty table is no reason
to end everybody's training.

An unknown user, a wrong key and an empty table make one answer, after the same work: the real
reason is a note on the error, for the log. Failures are limited by address and user, and by address
alone; who has the right key is let in nevertheless, or anybody at an address could lock out all.

Concurrency: everything may block, for some times the table's deadline, and is called
from threads, however many. Of those that need the table read, one reads it for all, and `current`
does not wait for that one.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from diesel_fs.errors import BusyError, DieselError, MetadataError, PermissionDenied
from diesel_fs.net import keys
from diesel_fs.net.frames import USER_BYTES_MAX, login_challenge
from diesel_fs.storage.accounts.account import Account, Accounts, Role
from diesel_fs.storage.accounts.store import NO_TOKEN, AccountTable

from .limits import network_of

log = logging.getLogger("diesel.server")

REFRESH_S = 2.0
ROLES_S = 30.0
"""As long as a commit waits for a Redis that restarts: a put goes on, if that comes back."""

COPY_S = 3600.0

RETRY_S = 10.0
"""Between readings for the sake of `current` where the last one failed: each costs time."""

ADVICE_S = 60.0
ADDRESSES_MAX = 4096

NO_ACCOUNTS = (
    "there are no accounts, so nobody can log in: "
    "`dlcmd --url STORE?meta=... user add NAME --admin`, or `user import FILE` after a loss"
)


class Rate(NamedTuple):
    """So many at once, and then one every so many seconds."""

    burst: int
    each_s: float


OF_USER = Rate(10, 6.0)
OF_ADDRESS = Rate(100, 0.6)
"""Many users may come from one address; a key cannot be guessed, so this is against work and
lines in the log."""


@dataclass(frozen=True, slots=True)
class _AccountsCopy:
    """What is known of the accounts: read at once, and replaced as a whole."""

    accounts: Accounts = field(default_factory=dict)
    since_s: float = float("-inf")  # when reading them, or finding them unchanged, last began
    token: bytes = NO_TOKEN
    problem: DieselError | None = None
    lost: bool = False


class _Bucket:
    """How much of some rates is used up. The least used of too many is forgotten."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._free_s: OrderedDict[Hashable, float] = OrderedDict()  # when all will be free again

    def is_full(self, key: Hashable) -> bool:
        """Whether there is room for no more."""
        room_s = self._rate.burst * self._rate.each_s
        return self._free_s.get(key, 0) - self._clock() > room_s - self._rate.each_s

    def add(self, key: Hashable) -> None:
        """One more."""
        now = self._clock()
        self._free_s[key] = max(now, self._free_s.pop(key, now)) + self._rate.each_s
        if len(self._free_s) > ADDRESSES_MAX:
            self._free_s.popitem(last=False)


class TableAuthenticator:
    """Logins, and what is known of the accounts."""

    def __init__(
        self, open_table: Callable[[], AccountTable], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_table` is called until it gives a table: it may be away when we start."""
        self._open_table = open_table
        self._clock = clock
        self._table: AccountTable | None = None
        self._decoy_key = keys.public_key(keys.new_seed())  # its key is thrown away
        self._reading_lock = threading.Lock()  # held while the table is read
        self._asked_s = float("-inf")  # when the last reading began
        self._known = _AccountsCopy(problem=MetadataError("the accounts have not been read yet"))
        self._failures_lock = threading.Lock()  # guards the buckets and what follows
        self._of_user = _Bucket(OF_USER, clock)
        self._of_address = _Bucket(OF_ADDRESS, clock)
        self._advised = _Bucket(Rate(1, ADVICE_S), clock)

    @property
    def table(self) -> AccountTable:
        """The table, for changes. Raises MetadataError where it has not been opened yet."""
        self.refresh()
        if self._table is None:
            raise self._known.problem or MetadataError("the accounts cannot be read")
        return self._table

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        """The account of a user who has signed. The notes of an error are for the log alone.

        Raises PermissionDenied, BusyError after too many failures, MetadataError where the accounts
        cannot be looked up.
        """
        self._refresh(since_s=self._clock())
        network = network_of(address)
        key = (network, user[: USER_BYTES_MAX + 1])
        known = self._known
        accounts, ceiling = self._usable(known)
        account = accounts.get(user)
        public = account.public_key if account is not None else self._decoy_key
        # The same work whoever it is; a name that is none is signed as if it had been cut
        name = user.encode("utf-8", "replace")[:USER_BYTES_MAX].decode("utf-8", "ignore")
        matches = keys.verify(public, signature, login_challenge(nonce, binding, name or "-"))
        if account is not None and matches:
            return replace(account, ceiling=ceiling)
        if known.problem is not None:
            away = _away()
            away.add_note(known.problem.message)
            raise away
        with self._failures_lock:
            if self._of_user.is_full(key) or self._of_address.is_full(network):
                raise BusyError("too many failed logins from your address", advice="wait a minute")
        refusal = PermissionDenied(
            "no such user, or another key", advice="check --user and --key-file"
        )
        refusal.add_note("the signature is not by its key" if account else "there is no such user")
        with self._failures_lock:
            self._of_user.add(key)
            self._of_address.add(network)
            if known.token == NO_TOKEN and not self._advised.is_full(""):
                self._advised.add("")
                log.error("%s", NO_ACCOUNTS)
        raise refusal

    def current(self, account: Account) -> Account:
        """The account of who has logged in, as it is now.

        Raises PermissionDenied where it has been removed or has another key, MetadataError where
        nobody could tell for `COPY_S`.
        """
        patience_s = REFRESH_S if self._known.problem is None else RETRY_S
        self._refresh(since_s=self._clock() - patience_s, wait=False)
        accounts, ceiling = self._usable(self._known, or_lost=True)
        found = accounts.get(account.name)
        if ceiling is Role.NONE:
            raise _away()
        if found is None or found.public_key != account.public_key:
            raise PermissionDenied(
                f"the account {account.name!r} is not valid any more", advice="log in again"
            )
        return found if found.ceiling is ceiling else replace(found, ceiling=ceiling)

    def _usable(self, known: _AccountsCopy, *, or_lost: bool = False) -> tuple[Accounts, Role]:
        """The accounts that count now, and what their users may do at most."""
        age_s = self._clock() - known.since_s
        if age_s > COPY_S or (known.lost and not or_lost):
            return {}, Role.NONE
        if known.lost or age_s > ROLES_S:
            return known.accounts, Role.READ
        return known.accounts, Role.ADMIN

    # The copy

    def refresh(self) -> None:
        """Read the table again. Where it cannot be read, that is logged."""
        self._refresh(since_s=self._clock())

    def close(self) -> None:
        """Let go of the table."""
        with self._reading_lock:
            if self._table is not None:
                self._table.close()

    def _refresh(self, since_s: float, *, wait: bool = True) -> None:
        """Read the table, unless somebody has begun to since then (or, not to `wait`, does now)."""
        if not self._reading_lock.acquire(blocking=wait):
            return
        try:
            if self._asked_s <= since_s:
                self._asked_s = self._clock()
                self._read()
        except Exception as error:
            if not isinstance(error, DieselError):
                log.exception("the accounts cannot be read")
                error = MetadataError("the accounts cannot be read")
            before = self._known.problem
            if before is None or before.message != error.message:
                log.warning("the accounts cannot be looked up: %s", error)
            self._known = replace(self._known, problem=error)
        finally:
            self._reading_lock.release()

    def _read(self) -> None:
        if self._table is None:
            self._table = self._open_table()
        before = self._known
        accounts, token = before.accounts, self._table.token()
        if token != before.token:
            state = self._table.read()
            accounts, token = state.accounts, state.token
        if token != NO_TOKEN or not (before.lost or before.accounts):
            self._known = _AccountsCopy(accounts, self._asked_s, token)
        else:
            if not before.lost:
                log.error("the accounts have been lost: %s", NO_ACCOUNTS)
            self._known = _AccountsCopy(before.accounts, before.since_s, token, lost=True)


def _away() -> MetadataError:
    return MetadataError("the accounts cannot be looked up now", advice="try again later")

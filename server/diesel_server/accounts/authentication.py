"""Checks logins, and the accounts of open connections, against the table of accounts.

A login is checked against a table that was read after it had arrived. Open connections look up
their account in a copy that is at most `REFRESH_S` old, so a removed user, or a changed key or
role, has an effect by then.

While the table cannot be read, users in the copy keep their roles for `ROLES_S`, and may then read
until `COPY_S` (`Account.ceiling`). If the table has been lost (Redis came back without data), no
user can log in; open connections may read until `COPY_S`, since an empty table is no reason to end
training jobs.

An unknown user, a wrong key and an empty table give the same answer after the same work, so a
client learns nothing from it; a note on the error has the real reason, for the log. Failed logins
are limited for each network, and for each user in a network. Beyond the limit, the right key still
works: otherwise anybody in a network could lock out all others there.

Concurrency: many threads call the methods, which may block for a few deadlines of the table. One
thread at a time reads the table, for all threads that wait; `current` does not wait for it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diesel_fs.errors import BusyError, DieselError, MetadataError, PermissionDenied
from diesel_fs.net import keys
from diesel_fs.net.frames import USER_BYTES_MAX, login_challenge
from diesel_fs.storage.accounts.account import Account, Accounts, Role
from diesel_fs.storage.accounts.store import NO_TOKEN, AccountTable

from ..limits import Rate, RateLimiter, network_of

log = logging.getLogger("diesel.server")

REFRESH_S = 2.0

ROLES_S = 30.0
"""Users keep their roles as long as a commit waits for a Redis that restarts, so that a put under
way can finish."""

COPY_S = 3600.0

RETRY_S = 10.0
"""After a failed read, `current` tries again only after this time: each attempt takes time."""

ADVICE_S = 60.0

NO_ACCOUNTS = (
    "there are no accounts, so no user can log in: run"
    " `dlcmd --url STORE?meta=... user add NAME --admin`, or `user import FILE` after a loss"
)


USER_RATE = Rate(10, 6.0)  # 10 at once, then one in 6 s
NETWORK_RATE = Rate(100, 0.6)
"""Keys cannot be guessed: these limits only bound the work and the lines in the log."""


@dataclass(frozen=True, slots=True)
class _AccountsCopy:
    """An instance is never changed, only replaced."""

    accounts: Accounts = field(default_factory=dict)
    since_s: float = float("-inf")  # when the last read, or check that nothing changed, began
    token: bytes = NO_TOKEN  # changes with the table
    problem: DieselError | None = None  # why the last read failed
    lost: bool = False  # the table is empty, and had accounts before


class TableAuthenticator:
    def __init__(
        self, open_table: Callable[[], AccountTable], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_table` is called again after it has raised DieselError."""
        self._open_table = open_table
        self._clock = clock
        self._table: AccountTable | None = None
        # Stands in for the key of an unknown user; nobody has its private key
        self._decoy_key = keys.public_key(keys.new_seed())
        self._reading_lock = threading.Lock()
        self._read_began_s = float("-inf")
        self._copy = _AccountsCopy(problem=MetadataError("the accounts have not been read yet"))
        self._failures_lock = threading.Lock()
        self._user_failures = RateLimiter(USER_RATE, clock)
        self._network_failures = RateLimiter(NETWORK_RATE, clock)
        self._advice_lines = RateLimiter(Rate(1, ADVICE_S), clock)

    @property
    def table(self) -> AccountTable:
        self.refresh()
        if self._table is None:
            raise self._copy.problem or MetadataError("the accounts cannot be read")
        return self._table

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        """The user must have signed `nonce` and `binding` (the digest of the connection's TLS
        certificate, or nothing). Raises PermissionDenied; MetadataError if the accounts cannot be
        looked up; BusyError after too many failures from `address`."""
        self._refresh(since_s=self._clock())
        network = network_of(address)
        key = (network, user[: USER_BYTES_MAX + 1])
        known = self._copy
        accounts, ceiling = self._usable(known)
        account = accounts.get(user)
        public = account.public_key if account is not None else self._decoy_key
        # The same work for any user; an impossible name becomes one that can be signed
        name = user.encode("utf-8", "replace")[:USER_BYTES_MAX].decode("utf-8", "ignore")
        matches = keys.verify(public, signature, login_challenge(nonce, binding, name or "-"))
        if account is not None and matches:
            return replace(account, ceiling=ceiling)
        if known.problem is not None:
            unavailable = _unavailable()
            unavailable.add_note(known.problem.message)
            raise unavailable
        with self._failures_lock:
            if self._user_failures.is_full(key) or self._network_failures.is_full(network):
                raise BusyError("too many failed logins from your address", advice="wait a minute")
        refusal = PermissionDenied(
            "no such user, or another key", advice="check --user and --key-file"
        )
        refusal.add_note("the signature is not by its key" if account else "there is no such user")
        with self._failures_lock:
            self._user_failures.add(key)
            self._network_failures.add(network)
            if known.token == NO_TOKEN and not self._advice_lines.is_full(""):
                self._advice_lines.add("")
                log.error("%s", NO_ACCOUNTS)
        raise refusal

    def current(self, account: Account) -> Account:
        """Raises PermissionDenied if the user was removed or has another key; MetadataError if the
        table could not be read for `COPY_S`."""
        patience_s = REFRESH_S if self._copy.problem is None else RETRY_S
        self._refresh(since_s=self._clock() - patience_s, wait=False)
        accounts, ceiling = self._usable(self._copy, or_lost=True)
        found = accounts.get(account.name)
        if ceiling is Role.NONE:
            raise _unavailable()
        if found is None or found.public_key != account.public_key:
            raise PermissionDenied(
                f"the account {account.name!r} is not valid any more", advice="log in again"
            )
        return found if found.ceiling is ceiling else replace(found, ceiling=ceiling)

    def _usable(self, known: _AccountsCopy, *, or_lost: bool = False) -> tuple[Accounts, Role]:
        """Returns also the highest role that users may use for now: NONE if the copy is too old, or
        if the table has been lost and not `or_lost`."""
        age_s = self._clock() - known.since_s
        if age_s > COPY_S or (known.lost and not or_lost):
            return {}, Role.NONE
        if known.lost or age_s > ROLES_S:
            return known.accounts, Role.READ
        return known.accounts, Role.ADMIN

    # The copy

    def refresh(self) -> None:
        """Reads the table now, if it has changed. Logs a failure."""
        self._refresh(since_s=self._clock())

    def close(self) -> None:
        with self._reading_lock:
            if self._table is not None:
                self._table.close()

    def _refresh(self, since_s: float, *, wait: bool = True) -> None:
        """Reads the table, unless another thread began to do so after `since_s`. Without `wait`,
        returns at once if another thread is reading."""
        if not self._reading_lock.acquire(blocking=wait):
            return
        try:
            if self._read_began_s <= since_s:
                self._read_began_s = self._clock()
                self._read()
        except Exception as error:
            if not isinstance(error, DieselError):
                log.exception("the accounts cannot be read")
                error = MetadataError("the accounts cannot be read")
            before = self._copy.problem
            if before is None or before.message != error.message:
                log.warning("the accounts cannot be looked up: %s", error)
            self._copy = replace(self._copy, problem=error)
        finally:
            self._reading_lock.release()

    def _read(self) -> None:
        if self._table is None:
            self._table = self._open_table()
        before = self._copy
        accounts, token = before.accounts, self._table.token()
        if token != before.token:
            state = self._table.read()
            accounts, token = state.accounts, state.token
        is_empty = token == NO_TOKEN
        # An empty table that had accounts before has been lost
        if not is_empty or not (before.lost or before.accounts):
            self._copy = _AccountsCopy(accounts, self._read_began_s, token)
        else:
            if not before.lost:
                log.error("the accounts have been lost: %s", NO_ACCOUNTS)
            self._copy = _AccountsCopy(before.accounts, before.since_s, token, lost=True)


def _unavailable() -> MetadataError:
    return MetadataError("the accounts cannot be looked up now", advice="try again later")

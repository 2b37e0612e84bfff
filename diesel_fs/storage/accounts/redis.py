"""The table of accounts in Redis, in the hash `USERS_KEY` beside the metadata.

A change reads all accounts. A script then writes the difference if the token (`AccountState`) is
still the same; otherwise the change starts again. So changes are atomic and may be sent twice. Any
thread, process or forked child.
"""

import functools
import secrets
from collections.abc import Callable
from typing import Self
from uuid import UUID

from ...errors import BusyError, CorruptError
from ..metadata.redis.head import open_link
from ..metadata.redis.head_scripts import SET_USERS
from ..metadata.redis.keys import SCHEMA, SCHEMA_KEY, USERS_KEY, USERS_TOKEN
from ..metadata.redis.link import DEADLINE_S, RedisCommand, RedisLink, ScriptCommand, Word
from ..metadata.redis.replies import packed_dict
from .account import Accounts, account_line, parse_account
from .store import NO_TOKEN, AccountState, AccountTable

_TOKEN_BYTES = 16
_TRIES_MAX = 50


class RedisAccounts(AccountTable):
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    @classmethod
    def open(cls, url: str, *, store: UUID, deadline_s: float = DEADLINE_S) -> Self:
        return cls(open_link(url, deadline_s=deadline_s, store=store))

    def __repr__(self) -> str:
        return f"RedisAccounts({self._link.address})"

    def read(self) -> AccountState:
        (reply,) = self._run("HGETALL", USERS_KEY)
        fields = packed_dict(reply)
        token = fields.pop(USERS_TOKEN, NO_TOKEN)
        accounts = {}
        for field, line in fields.items():
            account = parse_account(line, f"{self._link.address}, {USERS_KEY.decode()}")
            if account.name.encode() != field:
                raise CorruptError(
                    f"{self._link.address}: the account of {account.name!r} lies under another name"
                )
            accounts[account.name] = account
        return AccountState(token, accounts)

    def token(self) -> bytes:
        (reply,) = self._run("HGET", USERS_KEY, USERS_TOKEN)
        return reply if isinstance(reply, bytes) else NO_TOKEN

    def change(self, edit: Callable[[Accounts], Accounts]) -> Accounts:
        for _ in range(_TRIES_MAX):
            before = self.read()
            after = edit(before.accounts)
            words: list[Word] = [SCHEMA, before.token, secrets.token_bytes(_TOKEN_BYTES)]
            for name in sorted(before.accounts.keys() - after.keys()):
                words += [name, ""]  # removes it
            for name in sorted(after):
                if before.accounts.get(name) != after[name]:
                    words += [name, account_line(after[name])]
            run = ScriptCommand(SET_USERS, (SCHEMA_KEY, USERS_KEY), words)
            reply = self._link.with_retries(functools.partial(self._link.run_scripts, [run]))[0]
            assert isinstance(reply, list)
            if reply[0] == b"ok":
                self._link.with_retries(self._link.wait_durable)
                return after
        raise BusyError("too many processes change the accounts at once", advice="try again")

    def close(self) -> None:
        self._link.close()

    def _run(self, *words: Word) -> list[object]:
        return self._link.with_retries(lambda: self._link.run([RedisCommand(USERS_KEY, words)]))

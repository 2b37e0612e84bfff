"""Logins: which are accepted, how little a refusal reveals, how long a copy of the accounts is
used.
"""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from diesel_fs.errors import BusyError, DieselError, MetadataError, PermissionDenied
from diesel_fs.net import keys
from diesel_fs.net.frames import NO_BINDING, login_challenge
from diesel_fs.storage.accounts.account import Account, Role
from diesel_server.accounts.authentication import (
    COPY_S,
    NETWORK_RATE,
    REFRESH_S,
    RETRY_S,
    ROLES_S,
    USER_RATE,
    TableAuthenticator,
)
from diesel_server.limits import RATE_KEYS_MAX
from tests.rows import each_row

from .account_tables import MemoryTable, account, seed

ANN = account("ann", admin=True)
BOB = account("bob", pets=Role.WRITE)
EVE = account("eve")
NONCE = bytes(range(32))
TLS = bytes(31) + b"x"


class Logins:
    """An authenticator over a table in memory, at a time that only the test moves."""

    def __init__(self, *accounts: Account) -> None:
        self.now_s = 1000.0
        self.table = MemoryTable(*accounts)
        self.login = TableAuthenticator(lambda: self.table, lambda: self.now_s)

    def enter(
        self,
        user: str = "bob",
        key_of: str = "",
        *,
        binding: bytes = NO_BINDING,
        address: str = "192.0.2.1",
    ) -> Account:
        signature = keys.sign(seed(key_of or user), login_challenge(NONCE, binding, user))
        return self.login.authenticate(user, signature, NONCE, binding, address)

    def refused(
        self,
        user: str = "bob",
        error: type[DieselError] = DieselError,
        *,
        address: str = "192.0.2.1",
    ) -> DieselError:
        with pytest.raises(error) as caught:
            self.enter(user, "eve", address=address)
        return caught.value


@pytest.fixture
def at() -> Logins:
    return Logins(ANN, BOB)


# Logins that are accepted


def test_a_login_with_the_right_key_is_accepted(at: Logins) -> None:
    assert at.enter() == BOB
    assert at.enter("ann", binding=TLS) == ANN


def test_S1_a_login_with_another_key_is_refused(at: Logins) -> None:
    for signature in (b"", bytes(64), os.urandom(64), bytes(65)):
        with pytest.raises(PermissionDenied):
            at.login.authenticate("bob", signature, NONCE, NO_BINDING)
    with pytest.raises(PermissionDenied):
        at.enter("ann", key_of="bob")


def test_S2_a_signature_is_valid_for_one_nonce_and_binding_only(at: Logins) -> None:
    signature = keys.sign(seed("bob"), login_challenge(NONCE, TLS, "bob"))
    assert at.login.authenticate("bob", signature, NONCE, TLS) == BOB
    for user, nonce, binding in (
        ("bob", bytes(32), TLS),  # on another connection
        ("bob", NONCE, bytes(32)),  # to a server without TLS
        ("bob", NONCE, bytes(31) + b"y"),  # in the middle, with another certificate
        ("ann", NONCE, TLS),
    ):
        with pytest.raises(PermissionDenied):
            at.login.authenticate(user, signature, nonce, binding)


def test_S8_an_unknown_user_and_a_wrong_key_get_the_same_answer_without_a_secret(
    at: Logins, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason stands in a note, which does not travel."""
    caplog.set_level(logging.DEBUG)
    unknown, wrong = at.refused("eve"), at.refused("bob")
    assert (type(unknown), str(unknown)) == (type(wrong), str(wrong))
    assert unknown.__notes__ == ["there is no such user"]
    assert wrong.__notes__ == ["the signature is not by its key"]
    assert "bob" not in str(wrong)
    signature = keys.sign(seed("eve"), login_challenge(NONCE, NO_BINDING, "bob"))
    shown = repr(wrong) + str(wrong) + "".join(wrong.__notes__) + caplog.text + repr(at.login)
    for secret in (signature, seed("eve"), NONCE, at.login._decoy_key):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


@each_row("user", ["", "eve", "x" * 1000, "Ä" * 64, "../x", "\0", "bob ", "="])
def test_unknown_users_cost_the_same_work(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    """One signature is verified for any name, over words of the same kind."""
    verified = []
    real = keys.verify

    def verify(public: bytes, signature: bytes, content: bytes) -> bool:
        verified.append((len(public), len(signature), content[:-1].startswith(b"diesel-fs login")))
        return real(public, signature, content)

    monkeypatch.setattr("diesel_server.accounts.authentication.keys.verify", verify)
    at = Logins(ANN, BOB)
    at.refused()
    with pytest.raises(PermissionDenied):
        at.login.authenticate(user, bytes(64), NONCE, NO_BINDING)
    assert verified == [(32, 64, True)] * 2


def test_nobody_has_the_key_of_unknown_users(at: Logins) -> None:
    """If a user had that key, there would still be no account."""
    at.login._decoy_key = keys.public_key(seed("eve"))
    with pytest.raises(PermissionDenied):
        at.enter("eve")


def test_an_empty_table_refuses_every_login(at: Logins, caplog: pytest.LogCaptureFixture) -> None:
    empty = Logins()
    caplog.set_level(logging.INFO)
    errors = [empty.refused() for _ in range(3)]
    assert {str(error) for error in errors} == {str(at.refused())}
    (line,) = [line for line in caplog.messages if "there are no accounts" in line]
    assert "user add NAME --admin" in line
    assert "user import" in line
    empty.now_s += 61
    empty.refused()
    assert len([line for line in caplog.messages if "there are no accounts" in line]) == 2


def test_a_table_is_read_again_only_if_it_has_changed(at: Logins) -> None:
    for _ in range(5):
        at.enter()
    assert at.table.reads == 1
    at.table.put(EVE)
    assert at.enter("eve") == EVE  # at once
    at.table.remove("eve")
    with pytest.raises(PermissionDenied):
        at.enter("eve")


# Too many failures


def test_failed_logins_are_limited_by_user(at: Logins) -> None:
    for user in ("bob", "eve"):
        for _ in range(USER_RATE.burst):
            assert isinstance(at.refused(user), PermissionDenied)
        assert "too many" in str(at.refused(user, BusyError))
        at.now_s += USER_RATE.each_s
        assert isinstance(at.refused(user), PermissionDenied)
        at.refused(user, BusyError)
        for _ in range(3 * USER_RATE.burst):
            assert at.enter() == BOB  # a client without his key cannot lock him out


@each_row(
    ("addresses", "other"),
    [
        (["192.0.2.1", "::ffff:192.0.2.1"], "192.0.2.2"),
        (["2001:db8::1", "2001:db8::2", "2001:db8:0:0:ffff::"], "2001:db8:0:1::1"),
        (["strange"], "other"),
    ],
)
def test_failed_logins_are_limited_by_network(addresses: list[str], other: str) -> None:
    at = Logins(ANN, BOB)
    for i in range(NETWORK_RATE.burst):
        at.refused(f"u{i}", PermissionDenied, address=addresses[i % len(addresses)])
    for address in addresses:
        at.refused("new", BusyError, address=address)
        assert at.enter(address=address) == BOB
    at.refused("new", PermissionDenied, address=other)


def test_the_memory_for_failed_logins_is_limited(at: Logins) -> None:
    for i in range(20):
        with pytest.raises(PermissionDenied):
            at.login.authenticate("x" * 5000, b"", NONCE, NO_BINDING, f"a{i}")
    bucket = at.login._user_failures
    assert len(bucket._free_s) == 20
    assert all(len(str(key)) < 200 for key in bucket._free_s)
    for i in range(RATE_KEYS_MAX + 10):
        bucket.add(i)
    assert len(bucket._free_s) == RATE_KEYS_MAX


# How long a copy is valid


def test_a_revoked_role_ends_within_seconds(at: Logins) -> None:
    ann, bob = at.enter("ann"), at.enter()
    at.table.put(replace(BOB, grants={"pets": Role.READ}))
    at.table.put(replace(ANN, admin=False))
    at.now_s += REFRESH_S + 0.1
    assert at.login.current(bob).role("pets") is Role.READ
    assert not at.login.current(ann).admin
    at.table.put(replace(BOB, public_key=ANN.public_key))
    at.table.remove("ann")
    at.now_s += REFRESH_S + 0.1
    for one in (ann, bob):
        with pytest.raises(PermissionDenied, match="not valid any more"):
            at.login.current(one)
    at.table.remove("bob")  # the last user was removed, which is no loss of the table
    at.now_s += REFRESH_S + 0.1
    with pytest.raises(PermissionDenied):
        at.login.current(bob)


def test_an_unchanged_copy_of_the_accounts_is_used_again(at: Logins) -> None:
    bob = at.enter()
    before = at.table.tokens
    for _ in range(1000):
        at.login.current(bob)
        at.now_s += REFRESH_S / 100
    assert at.table.tokens - before <= 11
    assert at.table.reads == 1


# While the table is away


def test_C1_users_read_on_without_the_accounts(
    at: Logins, caplog: pytest.LogCaptureFixture
) -> None:
    """A Redis that restarts ends no put; then reading alone goes on; then nothing."""
    bob, since_s = at.enter(), at.now_s
    at.table.fault = MetadataError("cannot reach it")
    at.now_s = since_s + ROLES_S - 1
    assert at.login.current(bob) == BOB
    assert at.enter() == BOB
    at.now_s = since_s + ROLES_S + 1
    for low in (at.login.current(bob), at.enter()):
        low.require("pets", Role.READ)
        with pytest.raises(MetadataError):  # and not "not allowed"
            low.require("pets", Role.WRITE)
    with pytest.raises(MetadataError):
        at.enter("ann").require_admin()
    at.now_s = since_s + COPY_S - 1
    at.login.current(bob)
    at.now_s = since_s + COPY_S + 1
    with pytest.raises(MetadataError):
        at.login.current(bob)
    with pytest.raises(MetadataError):
        at.enter()
    at.table.fault = None
    at.now_s += RETRY_S + 1
    assert at.login.current(bob) == at.enter() == BOB
    warnings = [line for line in caplog.messages if "cannot be looked up" in line]
    assert warnings == ["the accounts cannot be looked up: cannot reach it"]


def test_unknown_users_cannot_log_in_while_the_accounts_are_away(at: Logins) -> None:
    """Users with another key may be right by now, so the answer is to try again."""
    at.enter()
    at.table.fault = MetadataError("cannot reach 10.0.0.7:6379")
    for _ in range(2 * USER_RATE.burst):
        errors = [at.refused(user, MetadataError) for user in ("eve", "bob")]
        assert len({str(error) for error in errors}) == 1
        assert "10.0.0.7" not in str(errors[0])
    at.table.fault = None
    assert at.enter() == BOB  # they did not count as failures


def test_a_server_without_accounts_refuses_every_login(caplog: pytest.LogCaptureFixture) -> None:
    at, away = Logins(BOB), [True]
    at.table.fault = ZeroDivisionError("a bug")

    def open_table() -> MemoryTable:
        if away:
            raise MetadataError("down")
        return at.table

    at.login = TableAuthenticator(open_table, lambda: at.now_s)
    with pytest.raises(MetadataError):
        _ = at.login.table
    for _ in ("away", "at fault"):
        with pytest.raises(MetadataError):
            at.enter()
        with pytest.raises(MetadataError):
            at.login.current(BOB)
        away.clear()
        at.now_s += RETRY_S + 1
    assert any(record.exc_info for record in caplog.records)
    at.table.fault = None
    assert at.enter() == BOB
    assert at.login.table is at.table


def test_a_hung_table_delays_no_request(at: Logins) -> None:
    bob = at.enter()
    at.now_s += REFRESH_S + 1
    at.table.gate = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        one = pool.submit(at.login.current, bob)
        while not at.login._reading_lock.locked():
            time.sleep(0.001)
        assert at.login.current(bob) == BOB  # or it would wait for the gate, which opens below
        before = at.table.tokens
        logins = [pool.submit(at.enter) for _ in range(3)]
        at.table.gate.set()
        assert [each.result(10) for each in [one, *logins]] == [BOB] * 4
        assert at.table.tokens - before <= 3


def test_many_logins_at_once_share_one_read_of_the_table(at: Logins) -> None:
    """Each is checked against a table that was read after it had arrived."""
    at.login = TableAuthenticator(lambda: at.table)
    at.enter()
    before, at.table.gate = at.table.tokens, threading.Event()
    with ThreadPoolExecutor(16) as pool:
        logins = [pool.submit(at.enter) for _ in range(16)]
        time.sleep(0.1)
        at.table.gate.set()
        assert [each.result(10) for each in logins] == [BOB] * 16
    assert at.table.tokens - before <= 4


# After a loss


def test_C3_after_a_loss_of_the_accounts_no_user_can_log_in_and_readers_go_on(
    at: Logins, caplog: pytest.LogCaptureFixture
) -> None:
    bob, since_s = at.enter(), at.now_s
    at.table.lose()
    with pytest.raises(PermissionDenied):
        at.enter()
    low = at.login.current(bob)
    low.require("pets", Role.READ)
    with pytest.raises(MetadataError):
        low.require("pets", Role.WRITE)
    assert [line for line in caplog.messages if "have been lost" in line and "user import" in line]
    at.now_s = since_s + COPY_S + 1
    with pytest.raises(MetadataError):
        at.login.current(bob)
    at.table.put(BOB)
    assert at.enter() == at.login.current(bob) == BOB

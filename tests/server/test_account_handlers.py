"""The requests about accounts: their roles and fields, and that an administrator always remains."""

import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import trio

from diesel_fs.errors import (
    ConflictError,
    CorruptError,
    DieselError,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.entries import Bytes
from diesel_fs.net import frames as wire
from diesel_fs.net.client import Answer
from diesel_fs.net.messages import Message, Value
from diesel_fs.repository.admin import Administration, DirectAdministration, RemoteAdministration
from diesel_fs.storage.accounts.account import (
    Account,
    Role,
    accounts_text,
    with_accounts,
    without_account,
)
from diesel_server.accounts.authentication import TableAuthenticator
from diesel_server.accounts.handlers import account_handlers
from diesel_server.requests.dispatcher import Handler, Reply, Request
from tests.rows import each_row
from tests.tiers import fast_first

from .account_tables import MemoryTable, account
from .test_requests import NEEDED

ANN = account("ann", admin=True)
BOB = account("bob", pets=Role.ADMIN, cars=Role.WRITE)
EVE = account("eve")
PUBLIC = account("new").public_key


class ServedAccounts:
    def __init__(self, *accounts: Account) -> None:
        self.table = MemoryTable(*accounts)
        self.login = TableAuthenticator(lambda: self.table)
        self.login.refresh()

    def link(self, user: Account) -> "Handled":
        return Handled(self.login, user)

    def remote(self, user: Account) -> RemoteAdministration:
        return RemoteAdministration(self.link(user))


@pytest.fixture
def served() -> ServedAccounts:
    return ServedAccounts(ANN, BOB, EVE)


@pytest.fixture
def table(served: ServedAccounts) -> MemoryTable:
    return served.table


async def _reply(handler: Handler, request: Request) -> Reply:
    found = handler(request)
    assert isinstance(found, Awaitable)
    return await found


class Handled:
    def __init__(self, login: TableAuthenticator, user: Account) -> None:
        self._handlers = account_handlers(login)
        self.user = user

    def call(
        self, message: Message, payload: Sequence[Bytes] = (), *, may_repeat: bool = True
    ) -> Answer:
        request = Request({**message, "id": 7}, memoryview(b"".join(payload)), self.user, "a:1")
        reply = trio.run(_reply, self._handlers[str(message["do"])], request)
        return Answer(reply.message, memoryview(b"".join(reply.payload)))

    def close(self) -> None:
        pass


@pytest.fixture(params=fast_first(["direct", "server"]))
def administration(request: pytest.FixtureRequest, served: ServedAccounts) -> Administration:
    if request.param == "direct":
        return DirectAdministration(served.table)
    return served.remote(ANN)


def test_users_are_added_renewed_and_removed(
    administration: Administration, table: MemoryTable
) -> None:
    administration.add("new", PUBLIC, admin=True)
    assert administration.accounts()["new"] == Account("new", PUBLIC, admin=True)
    with pytest.raises(ConflictError):
        administration.add("new", PUBLIC, admin=False)
    administration.replace_key("bob", PUBLIC, admin=False)
    assert table.accounts["bob"] == Account("bob", PUBLIC, grants=BOB.grants)
    administration.replace_key("bob", PUBLIC, admin=True)
    assert table.accounts["bob"].admin
    administration.remove("bob")
    assert set(table.accounts) == {"ann", "eve", "new"}
    for work in (
        lambda: administration.remove("bob"),
        lambda: administration.replace_key("bob", PUBLIC, admin=False),
        lambda: administration.grant("pets", "bob", Role.READ),
    ):
        with pytest.raises(NotFoundError):
            work()  # type: ignore[no-untyped-call]  # any of the lambdas


def test_roles_are_granted_and_revoked(administration: Administration, table: MemoryTable) -> None:
    administration.grant("pets", "eve", Role.READ)
    administration.grant("not-there-yet", "eve", Role.ADMIN)
    assert table.accounts["eve"].grants == {"pets": Role.READ, "not-there-yet": Role.ADMIN}
    administration.grant("pets", "eve", Role.NONE)
    administration.grant("pets", "eve", Role.NONE)
    assert table.accounts["eve"].grants == {"not-there-yet": Role.ADMIN}


def test_exports_are_imported(administration: Administration, table: MemoryTable) -> None:
    text, before = administration.export_text(), dict(table.accounts)
    assert text == accounts_text(before).encode()
    administration.add("new", PUBLIC, admin=False)
    administration.grant("pets", "eve", Role.WRITE)
    administration.import_text(text, replace=False)
    assert set(table.accounts) == {"ann", "bob", "eve", "new"}
    assert table.accounts["eve"] == EVE
    administration.import_text(text, replace=True)
    assert table.accounts == before


def test_bad_input_changes_nothing(administration: Administration, table: MemoryTable) -> None:
    before = table.accounts
    for text, error in (
        (b"", DieselError),
        (b'{"diesel-accounts": 2}\n', NewerVersionError),
        (administration.export_text() + b'{"user": 1}\n', CorruptError),
    ):
        for replace in (False, True):
            with pytest.raises(error):
                administration.import_text(text, replace=replace)
    for work in (
        lambda: administration.add("../x", PUBLIC, admin=True),
        lambda: administration.grant("pets", "../x", Role.READ),
        lambda: administration.add("new", bytes(32), admin=True),
        lambda: administration.replace_key("bob", bytes(32), admin=True),
        lambda: administration.grant("../x", "bob", Role.READ),
    ):
        with pytest.raises(UsageError):
            work()  # type: ignore[no-untyped-call]  # any of the lambdas
    assert table.accounts is before


REQUESTS: Mapping[str, tuple[Message, bytes]] = {
    "users": ({}, b""),
    "set_user": ({"user": "new", "public_key": PUBLIC}, b""),
    "remove_user": ({"user": "eve"}, b""),
    "import_users": ({"replace": False}, accounts_text({"new": account("new")}).encode()),
    "grant": ({"dataset": "pets", "user": "eve", "role": "read"}, b""),
}


@each_row("do", REQUESTS)
@each_row(
    ("user", "allowed"),
    [
        (ANN, set(REQUESTS)),
        (BOB, {"grant"}),
        (account("eve", pets=Role.WRITE), set()),
        (account("eve", pets=Role.READ), set()),
        (EVE, set()),
    ],
)
def test_each_request_needs_its_role(user: Account, allowed: set[str], do: str) -> None:
    served = ServedAccounts(*{each.name: each for each in (ANN, BOB, EVE, user)}.values())
    before, calls = served.table.accounts, served.link(user)
    message, payload = REQUESTS[do]
    if do in allowed:
        calls.call({"do": do, **message}, [payload])
        return
    invisible = do == "grant" and user.role("pets") is Role.NONE
    with pytest.raises(NoSuchDataset if invisible else PermissionDenied):
        calls.call({"do": do, **message}, [payload])
    assert served.table.accounts is before


def test_an_administrator_of_a_dataset_grants_roles_on_that_one(served: ServedAccounts) -> None:
    bob = served.remote(BOB)
    bob.grant("pets", "eve", Role.ADMIN)
    for dataset, user, error in (
        ("cars", "eve", PermissionDenied),
        ("cars", "bob", PermissionDenied),
        ("gone", "bob", NoSuchDataset),
        ("gone", "nobody", NoSuchDataset),  # whether there is such a user makes no difference
    ):
        with pytest.raises(error):
            bob.grant(dataset, user, Role.ADMIN)


# Users that have just lost a right


@each_row("do", REQUESTS)
@each_row(
    "left",
    [
        None,
        Account("ann", PUBLIC, admin=True),  # the account has another key
        Account("ann", ANN.public_key),  # and here another role
    ],
)
def test_a_revoked_role_cannot_be_used(left: Account | None, do: str) -> None:
    """This server may have an old copy: the table decides, in the same step."""
    served = ServedAccounts(ANN, BOB, EVE)
    table, login = served.table, served.login
    table.accounts = without_account(table.accounts, "ann")
    if left is not None:
        table.accounts = with_accounts(table.accounts, [left])
    before = table.accounts
    login.current(ANN)  # it does not know yet
    login.refresh = lambda: None  # type: ignore[method-assign]  # a fault is put in
    message, payload = REQUESTS[do]
    with pytest.raises((PermissionDenied, NoSuchDataset)):
        served.link(ANN).call({"do": do, **message}, [payload])
    assert table.accounts is before


def test_accounts_cannot_be_changed_while_they_cannot_be_read(served: ServedAccounts) -> None:
    served.table.fault = MetadataError("down")
    ann = served.remote(ANN)
    for work in (
        ann.export_text,
        lambda: ann.remove("eve"),
        lambda: ann.grant("d", "eve", Role.READ),
    ):
        with pytest.raises(MetadataError):
            work()


# The last administrator


def test_through_a_server_alone_the_last_administrator_stays(served: ServedAccounts) -> None:
    ann = served.remote(ANN)
    before = served.table.accounts
    without, demoted = {"bob": BOB}, {"ann": Account("ann", ANN.public_key)}
    for work in (
        lambda: ann.remove("ann"),
        lambda: ann.import_text(accounts_text(without).encode(), replace=True),
        lambda: ann.import_text(accounts_text(demoted).encode(), replace=False),
    ):
        with pytest.raises(ConflictError, match="no administrator"):
            work()  # type: ignore[no-untyped-call]  # any of the lambdas
    assert served.table.accounts is before
    ann.replace_key("ann", PUBLIC, admin=False)  # a new key takes nothing away
    assert served.table.accounts["ann"].admin
    DirectAdministration(served.table).remove("ann")  # by direct access the last one goes
    assert not any(each.admin for each in served.table.accounts.values())


# Fields that a client may send


@each_row(
    "message",
    [
        {"do": "set_user"},
        {"do": "set_user", "user": 1, "public_key": PUBLIC},
        {"do": "set_user", "user": "new", "public_key": "text"},
        {"do": "set_user", "user": "new", "public_key": PUBLIC, "admin": 1},
        {"do": "set_user", "user": "new", "public_key": PUBLIC, "new": "no"},
        {"do": "remove_user"},
        {"do": "remove_user", "user": ["eve"]},
        {"do": "import_users"},
        {"do": "import_users", "replace": 1},
        {"do": "grant", "dataset": "pets", "user": "eve"},
        {"do": "grant", "dataset": "pets", "user": "eve", "role": "owner"},
        {"do": "grant", "dataset": "pets", "user": "eve", "role": 3},
        {"do": "grant", "dataset": b"pets", "user": "eve", "role": "read"},
    ],
)
def test_bad_requests_change_nothing(served: ServedAccounts, message: dict[str, object]) -> None:
    before = served.table.accounts
    with pytest.raises(UsageError):
        served.link(ANN).call(cast(dict[str, Value], message))
    assert served.table.accounts is before


def test_changes_take_effect_on_this_server_at_once(served: ServedAccounts) -> None:
    served.remote(ANN).grant("pets", "eve", Role.READ)
    assert served.login.current(EVE).role("pets") is Role.READ
    served.remote(ANN).remove("eve")
    with pytest.raises(PermissionDenied):
        served.login.current(EVE)


def test_every_documented_request_has_a_handler_and_a_test(served: ServedAccounts) -> None:
    """`test_requests.py` tests those about datasets, this module those about accounts."""
    page = (Path(wire.__file__).parent / "WIRE.md").read_text(encoding="utf-8")
    table = page.partition("| `do` | role |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented - set(account_handlers(served.login)) == {"datasets", *NEEDED}
    assert set(account_handlers(served.login)) == set(REQUESTS) < documented

"""The promises of `AccountTable`, checked for every kind of table; then those of the file and
Redis.
"""

import errno
import itertools
import os
import signal
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    CorruptError,
    DieselError,
    MetadataError,
    NoSpaceError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.net import keys
from diesel_fs.storage.accounts.account import (
    Account,
    Accounts,
    Role,
    account_line,
    with_account,
    with_accounts,
    with_role,
    without_account,
)
from diesel_fs.storage.accounts.redis import RedisAccounts
from diesel_fs.storage.accounts.store import NO_TOKEN, AccountFile, AccountState, AccountTable
from diesel_fs.storage.metadata.redis.keys import USERS_KEY
from diesel_fs.storage.metadata.redis.link import RedisLink, ScriptCommand
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.storage.open_stores import open_accounts
from diesel_fs.urls import parse_url
from tests.forks import exit_code, fork, within
from tests.rows import each_row
from tests.storage.metadata.batches import files
from tests.storage.metadata.redis_servers import RedisServer, emptied_server, shared_cluster
from tests.tiers import fast_first
from tests.waiting import wait_until

STORE = uuid.UUID(int=5)
PUBLIC = keys.public_key(bytes(32))
ANN = Account("ann", PUBLIC, admin=True)
BOB = Account("bob", PUBLIC, grants={"pets": Role.READ})
EVE = Account("eve", PUBLIC)

Opener = Callable[[], AccountTable]


@pytest.fixture(params=fast_first(["file", "redis", "cluster"], 2))
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    if request.param == "file":
        return lambda: AccountFile(tmp_path / "accounts")
    if request.param == "redis":
        server = emptied_server()
        return lambda: RedisAccounts.open(server.url, store=STORE)
    cluster = shared_cluster()
    cluster.flush()
    return lambda: RedisAccounts.open(cluster.url, store=STORE)


@pytest.fixture
def table(opener: Opener) -> Iterator[AccountTable]:
    opened = opener()
    yield opened
    opened.close()
    opened.close()


def add(account: Account) -> Callable[[Accounts], Accounts]:
    return lambda accounts: with_account(accounts, account)


def put(more: list[Account]) -> Callable[[Accounts], Accounts]:
    return lambda accounts: with_accounts(accounts, more)


def give(dataset: str) -> Callable[[Accounts], Accounts]:
    return lambda accounts: with_role(accounts, "bob", dataset, Role.READ)


def test_a_change_is_read_by_others(table: AccountTable, opener: Opener) -> None:
    assert table.read() == AccountState(NO_TOKEN, {})
    assert table.token() == NO_TOKEN
    table.change(add(ANN))
    assert table.change(add(BOB)) == {"ann": ANN, "bob": BOB}
    other = opener()
    assert other.read().accounts == {"ann": ANN, "bob": BOB}
    other.change(lambda accounts: with_role(accounts, "bob", "pets", Role.NONE))
    other.close()
    assert table.read().accounts["bob"].grants == {}
    table.change(lambda accounts: with_accounts({}, [BOB]))
    assert table.read().accounts == {"bob": BOB}


def test_every_change_gives_another_token(table: AccountTable) -> None:
    seen = {NO_TOKEN}
    for edit in (
        add(ANN),
        add(BOB),
        lambda accounts: without_account(accounts, "ann"),
        lambda accounts: without_account(accounts, "bob"),
    ):
        table.change(edit)
        assert table.token() == table.read().token
        assert table.token() not in seen
        seen.add(table.token())
    assert table.read().accounts == {}  # but its token shows that it was not lost


def test_a_change_that_fails_changes_nothing(table: AccountTable) -> None:
    table.change(add(ANN))
    before = table.read()
    with pytest.raises(ConflictError):
        table.change(add(ANN))

    def breaks(accounts: Accounts) -> Accounts:
        raise KeyError

    with pytest.raises(KeyError):
        table.change(breaks)
    assert table.read() == before


def test_changes_are_made_one_after_another(opener: Opener, pool: ThreadPoolExecutor) -> None:
    opened = [opener() for _ in range(4)]
    opened[0].change(add(BOB))
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            found = opened[3].read().accounts
            assert len(found) % 2 == 1, sorted(found)

    def work(which: int) -> None:
        for number in range(10):
            pair = [Account(f"u{which}-{number}-{half}", PUBLIC) for half in "ab"]
            opened[which].change(put(pair))
            opened[which].change(give(f"d{which}-{number}"))

    watching = pool.submit(watch)
    try:
        assert [*pool.map(work, range(3))] == [None] * 3
    finally:
        done.set()
    watching.result()
    found = opened[3].read().accounts
    assert len(found) == 61
    assert len(found["bob"].grants) == 31
    for each in opened:
        each.close()


def test_forked_children_may_use_a_table(table: AccountTable) -> None:
    table.change(add(ANN))
    names = ["child0", "child1", "child2"]
    children = [fork(partial(table.change, add(Account(name, PUBLIC)))) for name in names]
    assert [*map(exit_code, children)] == [0, 0, 0]
    assert set(table.read().accounts) == {"ann", *names}


def test_recover_neither_makes_nor_removes_accounts() -> None:
    server, identity = emptied_server(), uuid.UUID(int=7)
    with (
        closing(RedisMetadata.open(server.url, store=STORE)) as meta,
        closing(RedisAccounts.open(server.url, store=STORE)) as accounts,
    ):
        meta.rebuild("pets", identity, [files(1, b"a/x").batch()])
        assert accounts.read() == AccountState()
        accounts.change(add(ANN))
        meta.rebuild("pets", identity, [files(1, b"a/x").batch()])
        meta.drop(identity)
        assert accounts.read().accounts == {"ann": ANN}


@pytest.fixture
def file(tmp_path: Path) -> AccountFile:
    table = AccountFile(tmp_path / "accounts")
    table.change(add(ANN))
    return table


def test_S17_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        AccountFile(tmp_path / "accounts").change(add(ANN))
    finally:
        os.umask(old)
    for name in ("accounts", "accounts.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_the_file_is_not_listed_as_an_object(tmp_path: Path) -> None:
    store = FolderStore.create(tmp_path / "store")
    url = parse_url((tmp_path / "store").as_uri())
    open_accounts(url, store).change(add(ANN))
    assert sorted(os.listdir(store.root)) == [
        "DIESEL-STORE",
        "accounts",
        "accounts.lock",
        "deleted",
    ]
    assert [*store.housekeeping.names("")] == ["DIESEL-STORE"]
    assert [*store.housekeeping.foreign(), *store.housekeeping.leftovers()] == []
    with pytest.raises(UsageError):
        store.get("accounts")
    assert FolderStore.create(store.root).store_id == store.store_id


def test_S6_a_file_that_others_can_write_or_planted_is_refused(file: AccountFile) -> None:
    for mode in (0o620, 0o602, 0o666):
        file.path.chmod(mode)
        with pytest.raises(PermissionDenied, match="chmod 600"):
            file.read()
    file.path.chmod(0o600)
    elsewhere = file.path.rename(file.path.with_name("elsewhere"))
    file.path.symlink_to(elsewhere)
    with pytest.raises(PermissionDenied):
        file.read()
    file.path.unlink()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(PermissionDenied):  # and does not hang
        file.read()
    file.path.unlink()
    lock = file.path.with_name("accounts.lock")
    lock.unlink()
    lock.symlink_to(elsewhere)
    with pytest.raises(PermissionDenied):
        file.change(add(ANN))


def test_a_damaged_file_is_an_error_and_not_overwritten(file: AccountFile) -> None:
    damaged = file.path.read_bytes()[:-9]
    file.path.write_bytes(damaged)
    for work in (file.read, lambda: file.change(add(BOB))):
        with pytest.raises(CorruptError, match="accounts: line 2"):
            work()
    assert file.path.read_bytes() == damaged


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    table = AccountFile(tmp_path / "unmounted/accounts")
    for work in (table.read, lambda: table.change(add(ANN))):
        with pytest.raises(MetadataError):
            work()


def test_waiting_for_the_lock_ends_with_an_error(tmp_path: Path) -> None:
    def slow(accounts: Accounts) -> Accounts:
        with pytest.raises(BusyError):
            AccountFile(tmp_path / "accounts", lock_s=0.1).change(add(BOB))
        return with_account(accounts, ANN)

    table = AccountFile(tmp_path / "accounts")
    table.change(slow)
    assert set(table.read().accounts) == {"ann"}


def test_a_kill_at_any_time_leaves_the_old_or_the_new_table(file: AccountFile) -> None:
    def change_for_ever() -> None:
        for number in itertools.count():
            file.change(put([Account(f"{half}{number % 50}", PUBLIC) for half in "ab"]))

    for round_number in range(10):
        before = file.token()
        child = fork(change_for_ever)
        wait_until(lambda before=before: file.token() != before)  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        time.sleep(0.002 * round_number)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        assert len(file.read().accounts) % 2 == (round_number + 1) % 2
        file.change(add(Account(f"round{round_number}", PUBLIC)))
    assert len(file.read().accounts) >= 13


@each_row(
    ("code", "of_folders", "error"),
    [
        (errno.ENOSPC, False, NoSpaceError),
        (errno.EIO, True, MetadataError),
        (errno.EINVAL, True, None),  # a file system that cannot sync folders is accepted
    ],
)
def test_a_change_that_cannot_be_synced_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    of_folders: bool,
    error: type[Exception] | None,
) -> None:
    table, real = AccountFile(tmp_path / "accounts"), os.fsync
    table.change(add(ANN))

    def picky(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == of_folders:
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", picky)
    with pytest.raises(error) if error else nullcontext():
        table.change(add(BOB))
    if error is NoSpaceError:
        assert table.read().accounts == {"ann": ANN}
    assert sorted(os.listdir(tmp_path)) == ["accounts", "accounts.lock"]


def test_a_crash_leaves_a_known_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore.create(tmp_path / "store")
    table = AccountFile(tmp_path / "store/accounts")

    def cut(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "rename", cut)
    monkeypatch.setattr(Path, "unlink", cut)
    with pytest.raises(MetadataError):
        table.change(add(ANN))
    assert [(each.host, each.pid) for each in store.housekeeping.leftovers()] == [
        (os.uname().nodename, os.getpid())
    ]
    assert [*store.housekeeping.foreign()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_the_file_gets_the_owner_of_its_folder(tmp_path: Path) -> None:
    """Root can write accounts for a server that runs as another user."""
    os.chown(tmp_path, 12345, 12346)
    table = AccountFile(tmp_path / "accounts")
    table.change(add(ANN))
    for name in ("accounts", "accounts.lock"):
        found = (tmp_path / name).stat()
        assert (found.st_uid, found.st_gid) == (12345, 12346)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"appendonly": "yes"}) as server:
        yield server


@pytest.fixture
def in_redis(server: RedisServer) -> Iterator[RedisAccounts]:
    with closing(RedisAccounts.open(server.url, store=STORE, deadline_s=10)) as table:
        table.change(put([ANN, BOB]))
        yield table


def test_another_repositorys_redis_is_refused(server: RedisServer, in_redis: RedisAccounts) -> None:
    with pytest.raises(ConfigError, match="another object store"):
        RedisAccounts.open(server.url, store=uuid.UUID(int=6))


def test_a_lost_reply_counts_once(in_redis: RedisAccounts, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, lost = RedisLink.run_scripts, list[bool]()

    def loses_an_answer(link: RedisLink, runs: Iterable[ScriptCommand]) -> list[object]:
        replies = scripts(link, runs)
        if not lost:
            lost.append(True)
            raise ConnectionResetError
        return replies

    monkeypatch.setattr(RedisLink, "run_scripts", loses_an_answer)
    in_redis.change(add(EVE))
    assert lost
    assert set(in_redis.read().accounts) == {"ann", "bob", "eve"}


def test_accounts_survive_a_restart_of_redis(server: RedisServer, in_redis: RedisAccounts) -> None:
    server.kill()
    server.start()
    assert in_redis.read().accounts == {"ann": ANN, "bob": BOB}


def test_C7_a_full_memory_still_removes_users(server: RedisServer, in_redis: RedisAccounts) -> None:
    """Access can be revoked at any time."""
    server.client().config_set("maxmemory", 1)
    with pytest.raises(NoSpaceError):
        in_redis.change(add(EVE))
    in_redis.change(lambda accounts: without_account(accounts, "bob"))
    assert set(in_redis.read().accounts) == {"ann"}


def test_C1_a_table_that_cannot_be_reached_is_an_error(server: RedisServer) -> None:
    table = RedisAccounts.open(server.url, store=STORE, deadline_s=0.3)
    table.change(add(ANN))
    server.kill()
    with within(10):
        for work in (table.read, table.token, lambda: table.change(add(BOB))):
            with pytest.raises(MetadataError):
                work()


@each_row("value", [b"", b"\xff", b"{}", account_line(BOB).encode(), b"[" * 10000])
def test_damaged_text_fails(server: RedisServer, in_redis: RedisAccounts, value: bytes) -> None:
    server.client().hset(USERS_KEY, "ann", value)
    with pytest.raises(DieselError):
        in_redis.read()


def test_S8_a_table_has_no_secrets(server: RedisServer, in_redis: RedisAccounts) -> None:
    found = server.client().hgetall(USERS_KEY)
    assert isinstance(found, dict)
    assert found.keys() == {b"=", b"ann", b"bob"}
    assert [found[b"ann"], found[b"bob"]] == [account_line(each).encode() for each in (ANN, BOB)]


def test_a_bucket_without_a_metadata_store_has_no_accounts(tmp_path: Path) -> None:
    store = FolderStore.create(tmp_path / "store")
    with pytest.raises(MetadataError, match="meta=redis"):
        open_accounts(parse_url("s3://bucket"), store)

"""Registration through servers: every server gives the same task, and no user sees another
user's."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import trio

from diesel_fs.errors import ConflictError, DieselError, MetadataError, NoSuchDataset, UsageError
from diesel_fs.net.client import ServerLink
from diesel_fs.net.messages import Fields, Message
from diesel_fs.net.tls import load_certificate
from diesel_fs.peers.members import registry as registry_module
from diesel_fs.peers.members.membership import (
    Member,
    MemberRecord,
    Membership,
    TaskName,
    join_message,
    parse_join,
    parse_join_reply,
    secret_from_key,
)
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.peers.members.registry import Registry, open_registry
from diesel_fs.peers.reader.store import master_request
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.storage.open_stores import open_accounts
from diesel_fs.urls import parse_url
from diesel_server.requests.directory import DatasetRef
from diesel_server.requests.dispatcher import Reply, Request
from diesel_server.requests.tasks import TaskHandlers
from tests.rows import each_row
from tests.server.certificates import Authority
from tests.server.fake_server import ThreadedServer as StandIn
from tests.server.server_with_redis import ServerWithRedis, server_with_redis
from tests.storage.metadata.redis_servers import RedisServer, execute, until

from .redis_places import master

KEY = b"a key of some length"
READER = {"ds": Role.READ}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWithRedis]:
    """Two servers over one Redis; ann and bob may read `ds`, eve another dataset."""
    users: list[Account | str] = [
        "root",
        Account("ann", b"", grants=READER),
        Account("bob", b"", grants=READER),
        Account("eve", b"", grants={"other": Role.ADMIN}),
        Account("gone", b"", grants=READER),
    ]
    with server_with_redis(tmp_path_factory.mktemp("two"), *users, workers=1) as found:
        found.add()
        with found.open() as repository:
            repository.begin("ds")
        yield found


def at(two: ServerWithRedis, name: str, server: int) -> RemoteRepository:
    kept, two.servers = two.servers, [two.servers[server]]
    try:
        return two.open(name)
    finally:
        two.servers = kept


def task_of(two: ServerWithRedis, user: str = "ann") -> TaskName:
    with two.open() as repository:
        return TaskName(repository.dataset("ds").identity, user, "resnet")


def ranks(registry: Registry, me: Member) -> list[int]:
    return [each.rank for each in registry.renew(me).members]


@contextmanager
def nothing_left(two: ServerWithRedis) -> Iterator[None]:
    yield
    assert two.redis.client().keys("dfs:{task.*") == []


@contextmanager
def registered(registries: Sequence[Registry]) -> Iterator[Membership]:
    """Yields the last one's answer."""
    yield [each.renew(master(rank)) for rank, each in enumerate(registries)][-1]
    for rank, each in enumerate(registries):
        each.leave(master(rank))


def test_any_server_gives_the_same_task_and_so_does_redis_itself(two: ServerWithRedis) -> None:
    task = task_of(two)
    with nothing_left(two), two.direct() as direct:
        stores = [at(two, "ann", 0), at(two, "ann", 1), direct]
        registries = [open_registry(each, task) for each in stores]
        with registered(registries) as found:
            assert found.members == (master(0), master(1), master(2))
            assert all(each.renew(master(rank)) == found for rank, each in enumerate(registries))
            registries[2].renew(master(1, 77))
            with pytest.raises(ConflictError, match="newer master of rank 1"):
                registries[1].renew(master(1))
            registries[2].leave(master(1, 77))
        for each in registries:
            each.close()


def test_the_task_is_of_the_account(two: ServerWithRedis) -> None:
    with two.open("ann") as repository:
        view = repository.view("ds")
        reply_to = master_request(TaskOptions(task="t"), repository, view, memory_bytes=0)
        assert reply_to.name == TaskName(view.identity, "ann", "t")


@pytest.mark.parametrize("as_whom", ["bob", "ann"])
def test_S14_S17_other_users_cannot_see_or_join_a_task(two: ServerWithRedis, as_whom: str) -> None:
    """The message may name any user: the server uses the account that is logged in."""
    anns, bobs = (open_registry(two.open(user), task_of(two, user=as_whom))
                  for user in ("ann", "bob"))  # fmt: skip
    with nothing_left(two):
        hers, his = anns.renew(master(0)), bobs.renew(master(1))
        assert hers.members == (master(0),)
        assert his.members == (master(1),)
        assert hers.secret != his.secret
        bobs.leave(master(0))
        assert anns.renew(master(0)) == hers
        bobs.renew(master(0, 50))
        assert anns.renew(master(0)) == hers
        anns.leave(master(0))
        bobs.leave(master(0, 50))
        bobs.leave(master(1))


def test_S10_a_user_without_a_role_cannot_join_a_task(two: ServerWithRedis) -> None:
    for task in (task_of(two, user="eve"), TaskName(uuid4(), "eve", "t")):
        registry = open_registry(two.open("eve"), task)
        with pytest.raises(NoSuchDataset):
            registry.renew(master(0))
        with pytest.raises(NoSuchDataset):
            registry.leave(master(0))


def test_a_removed_account_cannot_renew(two: ServerWithRedis) -> None:
    registry = open_registry(two.open("gone"), task_of(two, user="gone"))
    registry.renew(master(0))
    with two.direct() as direct:
        table = open_accounts(direct.url, direct.objects)
        table.change(lambda before: {name: each for name, each in before.items() if name != "gone"})
        table.close()

    def is_refused() -> bool:
        try:
            registry.renew(master(0))
        except MetadataError:
            raise
        except DieselError:
            return True
        return False

    until(is_refused, "the end of an account", 15)
    until(lambda: not two.redis.client().keys("dfs:{task.*"), "the end of its registration", 10)


def test_G1_a_hanging_server_costs_no_registration(two: ServerWithRedis) -> None:
    task, mine = task_of(two), two.open("ann")
    registry = open_registry(mine, task)
    registry.renew(master(0))
    link = mine._link
    assert isinstance(link, ServerLink)
    ports = [server.port for server in two.servers]
    used = ports.index(link._addresses[link._first].port)
    other = open_registry(at(two, "ann", 1 - used), task)
    other.renew(master(1))
    hung = [two.servers[used].pid, *two.servers[used].workers()]
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(4):
            start = time.monotonic()
            assert ranks(registry, master(0)) == [0, 1]
            assert time.monotonic() - start < 2.5
            assert ranks(other, master(1)) == [0, 1]
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
    registry.leave(master(0))
    other.leave(master(1))


def test_servers_soon_report_that_redis_is_away(two: ServerWithRedis) -> None:
    registries = [open_registry(two.open("ann"), task_of(two)) for _ in range(3)]

    def are_back() -> bool:
        try:
            return [each.renew(master(i)) for i, each in enumerate(registries)][-1] == before
        except MetadataError:
            return False

    with registered(registries) as before:
        two.redis.kill()
        try:
            for rank, registry in enumerate(registries):
                start = time.monotonic()
                with pytest.raises(MetadataError):
                    registry.renew(master(rank))
                assert time.monotonic() - start < 4
        finally:
            two.redis.start()
        until(are_back, "the registrations", 15)


def test_G2_no_request_waits_for_a_redis_that_is_known_to_be_away(tmp_path: Path) -> None:
    """Otherwise thousands of renewals would wait one after the other, long after Redis is back."""
    message = join_message(TaskName(UUID(int=7), "ann", "t"), master(0), MemberRecord())
    with RedisServer(tmp_path / "redis") as redis:
        url = f"{tmp_path.joinpath('store').as_uri()}?meta={redis.url}"
        with LocalRepository.open(url, create=True) as repository:
            tasks = TaskHandlers(repository)
            reply_to(tasks, message, "127.0.0.1:1", secured=False)
            redis.signal(signal.SIGSTOP)
            took = []
            for _ in range(10):
                start = time.monotonic()
                with pytest.raises(DieselError):
                    reply_to(tasks, message, "127.0.0.1:1", secured=False)
                took.append(time.monotonic() - start)
            redis.signal(signal.SIGCONT)
            assert took[0] < 1.5
            assert sum(took[1:]) < 0.5
            time.sleep(1.0)
            reply_to(tasks, message, "127.0.0.1:1", secured=False)


def test_registrations_that_redis_lost_come_back_with_the_same_secret(two: ServerWithRedis) -> None:
    """Over loopback a client may send the secret again, but not over a link that others can
    read."""
    task = task_of(two)
    registries = [open_registry(at(two, "ann", server), task) for server in range(2)]
    with registered(registries) as before:
        client = two.redis.client()
        for key in client.keys("dfs:{task.*"):
            client.delete(key)
        for rank, registry in enumerate(registries):
            after = registry.renew(master(rank))
        assert after == replace(before, was_forgotten=True)


@each_row(
    ("url", "may"),
    [
        ("diesel+tls://far:1", True),
        ("diesel://127.0.0.1:1,localhost:2,[::1]:3", True),
        ("diesel://127.0.0.1:1,far:2", False),
        ("diesel://far:1", False),
    ],
)
def test_S1_a_secret_is_sent_over_private_links_only(url: str, may: bool) -> None:
    assert registry_module._is_private_link(parse_url(url)) is may


# Which links may carry the secret


def reply_to(
    tasks: TaskHandlers, message: Message, peer: str, *, secured: bool, do: str = "join"
) -> Message:
    known = DatasetRef("ds", UUID(int=7), 0)
    request = Request(message, memoryview(b""), Account("ann", b""), peer, secured)
    handler = tasks.join if do == "join" else tasks.leave
    return trio.run(handler, request, known).message


@pytest.mark.parametrize(
    ("peer", "secured", "is_given"),
    [
        ("192.0.2.7:1", False, False),
        ("192.0.2.7:1", True, True),
        ("127.0.0.1:1", False, True),
        ("127.1.2.3:1", False, True),
        ("[::1]:1", False, True),
        ("[::ffff:127.0.0.1]:1", False, True),
        ("[::ffff:192.0.2.7]:1", False, False),
        ("[fe80::1%lo]:1", False, False),
        ("[2001:db8::1]:1", False, False),
        ("test", False, False),
        ("", False, False),
    ],
)
def test_S1_a_server_gives_the_secret_over_private_links_only(
    two: ServerWithRedis, peer: str, secured: bool, is_given: bool
) -> None:
    task = TaskName(UUID(int=7), "ann", "t")
    with nothing_left(two), two.direct() as repository:
        tasks = TaskHandlers(repository)
        open_message = join_message(task, master(0), MemberRecord())
        if is_given:
            answer = parse_join_reply(reply_to(tasks, open_message, peer, secured=secured))
            assert len(answer.secret) == 32
            reply_to(tasks, open_message, peer, secured=secured, do="leave")
        else:
            with pytest.raises(UsageError) as error:
                reply_to(tasks, open_message, peer, secured=secured)
            assert "--task-key-file" in error.value.advice
            assert two.redis.client().keys("dfs:{task.*") == []
        mine = replace(master(0), has_key_file=True)
        own = join_message(task, mine, MemberRecord(secret=bytes(32)))
        answer = parse_join_reply(reply_to(tasks, own, peer, secured=secured))
        assert answer.secret == b""
        assert answer.members == (mine,)
        reply_to(tasks, own, peer, secured=secured, do="leave")


def test_a_task_with_a_key_file_works_over_any_link(two: ServerWithRedis) -> None:
    task = task_of(two)
    registries = [open_registry(at(two, "ann", server), task, key=KEY) for server in range(2)]
    with nothing_left(two), registered(registries) as found:
        assert found.secret == secret_from_key(KEY)
        assert len(found.members) == 2


def test_a_connection_knows_its_security(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def way(request: Request) -> Reply:
        return Reply({"secured": request.secured})

    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    pair = authority.issue()
    certificate = load_certificate(pair.certificate, pair.key)
    for found, secured in ((None, False), (certificate, True)):
        with StandIn({"way": way}, certificate=found) as server:
            assert server.link().call({"do": "way"}).message["secured"] is secured


# Faults


@each_row(
    "wrong",
    [
        *({"rank": rank} for rank in (-1, 0xFFFE, "0", True)),
        *({"instance": instance} for instance in (b"", bytes(17))),
        *({"address": address} for address in ("x", "x:1\0", "x" * 5000 + ":1")),
        *({"holds": -1}, {"certificate": bytes(31)}, {"keyed": 1}, {"task": "../x"}, {"task": ""}),
        *({"since": since} for since in (-1, (1 << 52) + 1)),
        *({"state": 1.5}, {"secret": bytes(31)}, {"secret": "x"}),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(two: ServerWithRedis, wrong: Message) -> None:
    with nothing_left(two), two.open("ann") as repository:
        task = task_of(two)
        message = {**join_message(task, master(0), MemberRecord()), **wrong}
        with pytest.raises(UsageError):
            repository.ask_task("join", task.identity, message, 10)
        whole = join_message(task, master(0), MemberRecord())
        for name in whole.keys() - {"since", "state", "keyed"}:
            less = {each: value for each, value in whole.items() if each != name}
            with pytest.raises(UsageError):
                repository.ask_task("join", task.identity, less, 10)


def test_a_client_cannot_choose_how_long_a_registration_lasts(two: ServerWithRedis) -> None:
    task = task_of(two)
    with nothing_left(two), two.open("ann") as repository:
        message = {**join_message(task, master(0), MemberRecord()), "user": "bob", "seconds": 10**6}
        repository.ask_task("join", task.identity, message, 10)
        client = two.redis.client()
        assert all(client.pttl(key) <= 6000 for key in client.keys("dfs:{task.*"))
        assert execute(client, "DBSIZE") != 0
        repository.ask_task("leave", task.identity, message, 10)


def test_without_redis_a_server_names_the_options_that_help(tmp_path: Path) -> None:
    with LocalRepository.open(tmp_path.as_uri(), create=True) as repository:
        message = join_message(TaskName(UUID(int=7), "ann", "t"), master(0), MemberRecord())
        for do in ("join", "leave"):
            with pytest.raises(UsageError) as error:
                reply_to(TaskHandlers(repository), message, "127.0.0.1:1", secured=False, do=do)
            assert "--peers" in error.value.advice
            assert str(tmp_path) not in str(error.value)
        assert parse_join(Fields(message, "join"))[0] == "t"

"""Registrations in a real Redis, alone and as a cluster: the members of a task, expiry, and the
keys that are left."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.errors import ConfigError, ConflictError, MetadataError, UsageError
from diesel_fs.peers.members import redis_registry as redis_tasks
from diesel_fs.peers.members.membership import (
    ANY_INSTANCE,
    MEMBERS_MAX,
    MemberRecord,
    Membership,
    TaskName,
    pack_member,
    secret_from_key,
)
from diesel_fs.peers.members.redis_registry import RedisMemberStore
from diesel_fs.peers.members.registry import RedisRegistry, Registry, StaticRegistry, open_registry
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.redis.keys import task_keys
from tests.rows import each_row
from tests.storage.metadata.redis_servers import (
    RedisServer,
    execute,
    shared_cluster,
    shared_server,
    until,
)
from tests.storage.metadata.test_redis_faults import COMMANDS
from tests.tiers import fast_first

from ..redis_places import STORE, TASK, RedisPlace, master, redis_place

KEY = b"a key of some length"


@pytest.fixture(params=fast_first(["redis", "redis-cluster"]))
def place(request: pytest.FixtureRequest) -> Iterator[RedisPlace]:
    redis = shared_server() if request.param == "redis" else shared_cluster()
    with redis_place(redis) as found:
        yield found


@pytest.fixture
def alone() -> Iterator[RedisPlace]:
    with redis_place(shared_server()) as found:
        yield found


@pytest.fixture
def breakable(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisPlace]]:
    with RedisServer(tmp_path / "redis") as server, redis_place(server) as found:
        yield server, found


def ranks(membership: Membership) -> list[int]:
    return [each.rank for each in membership.members]


def test_masters_see_each_other(place: RedisPlace) -> None:
    first, second = place.registry(), place.registry()
    alone = first.renew(master(3))
    assert alone.members == (master(3),)
    assert len(alone.secret) == 32
    both = second.renew(master(1))
    assert both == Membership((master(1), master(3)), alone.secret)
    assert first.renew(master(3)) == both
    second.leave(master(1))
    second.leave(master(1))
    assert first.renew(master(3)) == alone
    assert second.renew(master(1)) == both  # it may come again


def test_C3_F8_masters_register_again_after_redis_lost_everything(place: RedisPlace) -> None:
    """The newer of two instances of a rank is known, though the older one, which may have been
    stopped for some time, renews first."""
    masters = [(place.registry(), master(rank)) for rank in range(3)]
    for registry, me in masters:
        assert not registry.renew(me).was_forgotten
    older, before = masters[0][0], masters[2][0].renew(master(2))
    place.forget_all()
    for registry, me in masters:
        after = registry.renew(me)
    assert after == replace(before, was_forgotten=True)
    assert masters[2][0].renew(master(2)) == before
    other = place.registry().renew(master(9))
    assert (other.secret, other.was_forgotten) == (before.secret, False)
    newer = place.registry()
    newer.renew(master(0, 20))
    place.forget_all()
    assert older.renew(master(0)).members == (master(0),)
    assert newer.renew(master(0, 20)).members == (master(0, 20),)
    with pytest.raises(ConflictError):
        older.renew(master(0))


def test_a_change_of_a_master_is_seen(place: RedisPlace) -> None:
    first, second = place.registry(), place.registry()
    first.renew(master(0))
    second.renew(master(1))
    newer = replace(master(1, version=2), address="[::1]:80", certificate=bytes(range(32)))
    assert second.renew(newer).members == (master(0), newer)
    seen = first.renew(master(0))
    assert seen.members == (master(0), newer)
    assert seen.of_version(2) == (newer,)


def test_members_are_sent_only_when_they_changed(place: RedisPlace) -> None:
    """Thousands of masters renew every two seconds. A registration without an answer may be
    repeated."""
    tasks = place.open()
    joined = tasks.join(TASK, master(0), MemberRecord())
    assert tasks.join(TASK, master(0), MemberRecord()) == joined
    answers = MemberRecord(joined.since, joined.state, joined.secret)
    again = tasks.join(TASK, master(0), answers)
    assert again == replace(joined, members=None)
    tasks.join(TASK, master(1), MemberRecord())
    changed = tasks.join(TASK, master(0), answers)
    assert set(changed.members or ()) == {master(0), master(1)}
    assert changed.state > joined.state


def test_F1_registrations_expire_and_leave_nothing(place: RedisPlace) -> None:
    stays, goes = place.registry(ttl_s=0.5), place.registry(ttl_s=0.5)
    goes.renew(master(1))
    assert ranks(stays.renew(master(0))) == [0, 1]
    for _ in range(8):
        time.sleep(0.1)
        found = stays.renew(master(0))
    assert ranks(found) == [0]
    left = [
        int(server.client().pttl(key))
        for server in place.servers
        for key in server.client().keys("dfs:{task.*")
    ]
    assert len(left) == 2
    assert all(0 < each <= 500 for each in left)
    until(lambda: not place.keys(), "the end of the last registration", 5)


def test_S2_the_last_leave_deletes_everything_and_ends_the_secret(place: RedisPlace) -> None:
    masters = [(place.registry(ttl_s=0.3), master(rank)) for rank in range(3)]
    for registry, me in masters:
        secret = registry.renew(me).secret
    for registry, me in masters:
        assert len(place.keys()) == 2
        registry.leave(me)
    assert place.keys() == []
    later = place.registry(ttl_s=0.3).renew(master(0)).secret
    time.sleep(0.4)
    assert len({secret, later, place.registry().renew(master(0)).secret}) == 3


def test_F8_the_newer_instance_of_a_rank_wins(place: RedisPlace) -> None:
    older, newer, other = (place.registry() for _ in range(3))
    assert older.renew(master(0, 10)).replaced_address == ""
    other.renew(master(1))
    found = newer.renew(master(0, 20))
    assert found.members[0] == master(0, 20)
    assert found.replaced_address == master(0, 10).address
    with pytest.raises(ConflictError, match="newer master of rank 0"):
        older.renew(master(0, 10))
    older.leave(master(0, 10))  # the older one is gone
    assert other.renew(master(1)).members == (master(0, 20), master(1))
    again = newer.renew(master(0, 20))
    assert again.members == (master(0, 20), master(1))
    assert again.replaced_address == ""
    assert older.renew(master(0, 30)).members[0] == master(0, 30)
    with pytest.raises(ConflictError):
        newer.renew(master(0, 20))


def test_a_new_instance_is_newer_even_if_the_clock_jumped_back(place: RedisPlace) -> None:
    tasks = place.open()
    ahead = MemberRecord(since=1 << 51)
    assert tasks.join(TASK, master(0, 10), ahead).since == 1 << 51
    joined = tasks.join(TASK, master(0, 20), MemberRecord())
    assert joined.members == (master(0, 20),)
    assert joined.since == (1 << 51) + 1
    with pytest.raises(ConflictError):
        tasks.join(TASK, master(0, 10), ahead)


def test_a_clock_that_jumped_back_extends_no_registration(alone: RedisPlace) -> None:
    registry = alone.registry(ttl_s=0.3)
    registry.renew(master(0))
    alone.registry(ttl_s=0.3).renew(master(1))
    client = alone.servers[0].client()
    client.zadd(task_keys(TASK.digest)[1], {"1": time.time() * 1e6 + 3600e6})
    assert ranks(registry.renew(master(0))) == [0, 1]
    end_s = time.monotonic() + 2
    while ranks(registry.renew(master(0))) != [0]:
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_while_redis_is_away_renewals_fail_and_afterwards_the_task_goes_on(
    breakable: tuple[RedisServer, RedisPlace],
) -> None:
    server, place = breakable
    registry, late = place.registry(), place.registry()
    before = registry.renew(master(0))
    server.kill()
    for each, me in ((registry, master(0)), (registry, master(0)), (late, master(1))):
        start = time.monotonic()
        with pytest.raises(MetadataError):
            each.renew(me)
        assert time.monotonic() - start < 4
    with pytest.raises(MetadataError):
        late.leave(master(1))
    server.start()
    after = registry.renew(master(0))
    assert (after.members, after.secret) == (before.members, before.secret)
    server.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(MetadataError):
            registry.renew(master(0))
        assert time.monotonic() - start < 5
    finally:
        server.signal(signal.SIGCONT)
    assert registry.renew(master(0)).members == before.members
    assert ranks(late.renew(master(1))) == [0, 1]


def test_S14_tasks_of_other_users_datasets_and_names_are_separate(place: RedisPlace) -> None:
    others = [
        replace(TASK, user="bob"),
        replace(TASK, name="other"),
        replace(TASK, identity=UUID(int=8)),
    ]
    found = [place.registry(task).renew(master(i)) for i, task in enumerate([TASK, *others])]
    assert [ranks(each) for each in found] == [[0], [1], [2], [3]]
    assert len({each.secret for each in found}) == 4


def test_the_masters_are_limited(place: RedisPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tasks, "MEMBERS_MAX", 2)
    registries = [place.registry() for _ in range(3)]
    for rank in range(2):
        registries[rank].renew(master(rank))
    with pytest.raises(MetadataError, match="has 2 masters"):
        registries[2].renew(master(2))
    assert ranks(registries[0].renew(master(0))) == [0, 1]
    assert ranks(registries[2].renew(master(1, 50))) == [0, 1]


def test_all_masters_at_once(place: RedisPlace) -> None:
    count = 40
    registries = [place.registry() for _ in range(count)]
    barrier = threading.Barrier(count)

    def join(rank: int) -> bytes:
        barrier.wait(20)
        return registries[rank].renew(master(rank)).secret

    with ThreadPoolExecutor(count) as threads:
        secrets = set(threads.map(join, range(count)))
    assert len(secrets) == 1
    assert ranks(registries[7].renew(master(7))) == [*range(count)]


def test_the_greatest_number_of_masters_can_register(alone: RedisPlace) -> None:
    tasks = alone.open(ttl_s=60)
    masters, ends = task_keys(TASK.digest)
    client = alone.servers[0].client()
    for rank in range(MEMBERS_MAX - 1):
        other = master(rank)
        client.hset(masters, str(rank), other.instance + bytes(8) + pack_member(other))
    until_us = time.time() * 1e6 + 50e6
    client.zadd(ends, dict.fromkeys(map(str, range(MEMBERS_MAX - 1)), until_us))
    me = master(MEMBERS_MAX - 1)
    joined = tasks.join(TASK, me, MemberRecord())
    assert joined.members is not None
    assert sorted(each.rank for each in joined.members) == [*range(MEMBERS_MAX)]
    start = time.monotonic()
    for _ in range(100):
        assert tasks.join(TASK, me, MemberRecord(joined.since, joined.state)).members is None
    assert time.monotonic() - start < 1  # and not that of all masters, each time


def test_foreign_values_in_redis_are_ignored(alone: RedisPlace) -> None:
    registry = alone.registry()
    registry.renew(master(0))
    masters, ends = task_keys(TASK.digest)
    client = alone.servers[0].client()
    later = time.time() * 1e6 + 5e6
    client.zadd(ends, {"1": later, "2": later, "3": later, "x": later, "-1": later})
    client.hset(masters, mapping={"1": b"short", "2": bytes(100), "x": b"?" * 90, "state": "5"})
    assert registry.renew(master(0)).members == (master(0),)
    assert ranks(alone.registry().renew(master(2))) == [0, 2]
    client.hset(masters, "secret", "short")
    with pytest.raises(MetadataError):
        registry.renew(master(0))
    client.delete(masters)
    client.set(masters, "no hash")
    with pytest.raises(MetadataError):
        registry.renew(master(0))


def test_S14_the_documented_rights_in_redis_suffice(
    breakable: tuple[RedisServer, RedisPlace],
) -> None:
    server, _ = breakable
    words = ["on", ">pw", "~dfs:*", *COMMANDS]
    execute(server.client(), "ACL", "SETUSER", "fit", *words)
    execute(server.client(), "SCRIPT", "FLUSH")
    url = server.url.replace("unix://", "unix://fit:pw@")
    with closing(RedisMemberStore.open(url, store=STORE, ttl_s=0.2)) as tasks:
        assert "pw" not in repr(tasks)
        tasks.join(TASK, master(0), MemberRecord())
        tasks.join(TASK, master(1), MemberRecord())
        time.sleep(0.3)
        joined = tasks.join(TASK, master(1), MemberRecord())
        assert joined.members == (master(1),)
        tasks.leave(TASK, master(1))


# Keys of the user's own


def test_with_a_key_file_redis_has_no_secret(place: RedisPlace) -> None:
    secret = secret_from_key(KEY)
    registries = [place.registry(secret=secret) for _ in range(2)]
    for rank in range(2):
        found = registries[rank].renew(master(rank))
    assert found.secret == secret
    assert ranks(found) == [0, 1]
    assert all(each.has_key_file for each in found.members)
    for server in place.servers:
        for key in server.client().keys("dfs:{task.*}:m"):
            assert server.client().hget(key, "secret") is None


@pytest.mark.parametrize("first", [None, secret_from_key(KEY)])
def test_nodes_of_a_task_all_have_a_key_file_or_none(
    place: RedisPlace, first: bytes | None
) -> None:
    """They would all be registered, and could not talk to each other."""
    one = place.registry(secret=first)
    one.renew(master(0))
    other = place.registry(secret=None if first else secret_from_key(KEY))
    with pytest.raises(UsageError, match="other nodes of task 'resnet' have") as error:
        other.renew(master(1))
    assert "the same" in error.value.advice
    assert ranks(one.renew(master(0))) == [0]


# The kind of registry


def test_the_members_are_the_given_peers() -> None:
    peers = ["a:1", "b:2", "[::1]:3"]
    registry = StaticRegistry(peers, b"s" * 32)
    me = replace(master(1), address="10.0.0.1:2", certificate=bytes(32), version=8)
    found = registry.renew(me)
    assert [each.address for each in found.members] == peers
    assert [each.instance for each in found.members] == [ANY_INSTANCE, me.instance, ANY_INSTANCE]
    assert len(found.of_version(8)) == 3
    assert found.secret == b"s" * 32
    with pytest.raises(UsageError):
        registry.renew(master(3))
    registry.leave(me)
    registry.close()


@each_row(
    ("peers", "secret"),
    [(["a:1"], None), (["a"], b"s"), (["a:1", "a:1"], b"s"), (["a:1"] * (MEMBERS_MAX + 1), b"s")],
)
def test_bad_lists_of_peers(peers: list[str], secret: bytes | None) -> None:
    with pytest.raises(UsageError):
        StaticRegistry(peers, secret)


def test_a_repository_opens_its_registry(tmp_path: Path, alone: RedisPlace) -> None:
    with LocalRepository.open(tmp_path.joinpath("a").as_uri(), create=True) as file:
        task = TaskName(UUID(int=7), "uid:7", "resnet")
        with pytest.raises(UsageError) as error:
            open_registry(file, task)
        assert "--peers" in error.value.advice
        with pytest.raises(UsageError, match="need a common secret") as error:
            open_registry(file, task, peers=["a:1"])
        assert "--task-key-file" in error.value.advice
        assert isinstance(open_registry(file, task, key=KEY, peers=["a:1"]), StaticRegistry)
    url = f"{tmp_path.joinpath('b').as_uri()}?meta={alone.url}"
    with LocalRepository.open(url, create=True) as both:
        registries: list[Registry] = [open_registry(both, task) for _ in range(2)]
        for rank, registry in enumerate(registries):
            assert isinstance(registry, RedisRegistry)
            found = registry.renew(master(rank))
            registry.close()
        assert ranks(found) == [0, 1]
        with pytest.raises(UsageError, match="shorter than 16"):
            open_registry(both, task, key=b"short")


def test_a_redis_of_another_store_is_refused(alone: RedisPlace) -> None:
    alone.open()
    with pytest.raises(ConfigError):
        RedisMemberStore.open(alone.url, store=UUID(int=5))

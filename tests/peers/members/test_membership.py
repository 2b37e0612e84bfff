"""Names, ranks, addresses and registrations as bytes: any input gives a value or an error, the same
on all nodes."""

import hashlib
from dataclasses import replace
from uuid import UUID

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.net.messages import Fields, unpack
from diesel_fs.peers.members.membership import (
    RANK_MAX,
    TIME_MAX,
    JoinReply,
    Member,
    MemberRecord,
    Membership,
    TaskName,
    join_message,
    join_reply_message,
    leave_message,
    pack_member,
    parse_join,
    parse_join_reply,
    parse_leave,
    resolve_node,
    secret_from_key,
    split_address,
    unpack_member,
)
from tests.rows import each_row

TASK = TaskName(UUID(int=7), "ann", "resnet")
ME = Member(3, bytes(range(16)), "node3:9301", 12, bytes(32), has_key_file=False)

hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9.-]{0,30}", fullmatch=True),
    st.ip_addresses(v=4).map(str).filter(lambda text: text != "0.0.0.0"),  # noqa: S104  # no socket is bound
    st.ip_addresses(v=6).map(lambda found: f"[{found}]").filter(lambda text: text != "[::]"),
)
members = st.builds(
    Member,
    st.integers(0, RANK_MAX),
    st.binary(min_size=16, max_size=16),
    st.builds("{}:{}".format, hosts, st.integers(1, 65535)),
    st.integers(0, (1 << 63) - 1),
    st.sampled_from([b"", bytes(range(32))]),
    st.booleans(),
)
times = st.integers(1, TIME_MAX)
secrets = st.sampled_from([b"", bytes(range(32))])


# Which node this is


SLURM = {"SLURM_NODEID": "3", "SLURM_NNODES": "8"}
TORCH = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


@each_row(
    ("environment", "rank", "world", "node"),
    [
        ({}, None, None, (0, 1)),
        ({}, 2, 4, (2, 4)),
        ({}, None, 1, (0, 1)),
        ({}, 0, None, (0, 1)),
        (SLURM, None, None, (3, 8)),
        (SLURM, 1, None, (1, 8)),
        (SLURM, None, 4, (3, 4)),
        (SLURM, 0, 2, (0, 2)),
        (SLURM | {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}, None, None, (1, 2)),
        ({"SLURM_NNODES": "8"}, None, None, (0, 1)),  # a shell of salloc, outside of its nodes
        (TORCH, None, None, (1, 2)),
        (SLURM | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, None, None, (3, 8)),
        ({"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, None, None, (0, 1)),  # no nodes'
    ],
)
def test_the_rank_and_world_of_a_node(
    environment: dict[str, str], rank: int | None, world: int | None, node: tuple[int, int]
) -> None:
    assert resolve_node(environment, rank, world) == node


@each_row(
    ("environment", "rank", "world"),
    [
        ({}, 1, None),  # the world is missing
        ({}, None, 4),  # all would be the first node
        *(({}, rank, world) for rank, world in ((4, 4), (-1, 4), (0, 0), (0, RANK_MAX + 2))),
        *((SLURM | {"SLURM_NODEID": each}, None, None) for each in ("8", "x", "-1")),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "0"}, None, None),
        (TORCH | {"GROUP_RANK": "9" * 5000}, None, None),
        (SLURM, None, 2),
    ],
)
def test_F8_contradictory_ranks_and_worlds_are_refused(
    environment: dict[str, str], rank: int | None, world: int | None
) -> None:
    with pytest.raises(UsageError) as error:
        resolve_node(environment, rank, world)
    assert error.value.advice


@given(
    st.dictionaries(
        st.sampled_from(["SLURM_NODEID", "SLURM_NNODES", "GROUP_RANK", "GROUP_WORLD_SIZE"]),
        st.one_of(st.text(max_size=4), st.integers(-2, 9).map(str)),
    ),
    st.one_of(st.none(), st.integers(-2, 9)),
    st.one_of(st.none(), st.integers(-2, 9)),
)
def test_any_environment_gives_a_node_or_an_error(
    environment: dict[str, str], rank: int | None, world: int | None
) -> None:
    try:
        found = resolve_node(environment, rank, world)
    except UsageError:
        return
    assert 0 <= found[0] < found[1] <= RANK_MAX + 1
    assert rank in (None, found[0])
    assert world in (None, found[1])


# Names


@each_row(
    ("user", "name"),
    [
        *(("ann", each) for each in ("", ".x", "-x", "a/b", "a b", "a" * 64, "a\n", "ä", "a\0")),
        *((each, "t") for each in ("", "a\0b", "a\n", "u" * 256)),
    ],
)
def test_bad_names_and_users_of_tasks(user: str, name: str) -> None:
    with pytest.raises(UsageError):
        TaskName(UUID(int=1), user, name)


task_names = st.builds(
    TaskName,
    st.sampled_from([UUID(int=0), UUID(int=1), UUID(int=1 << 127)]),
    st.sampled_from(["a", "ab", "b", "uid:1", "ann"]),
    st.sampled_from(["a", "ab", "b", "1", "ann"]),
)


@given(task_names, task_names)
def test_S17_tasks_differ_if_dataset_user_or_name_does(one: TaskName, other: TaskName) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_the_digest_is_that_of_PEERS_md() -> None:
    text = b"diesel-fs task 1\0" + bytes(15) + b"\7" + b"ann\0resnet"
    assert TASK.digest == hashlib.sha256(text).digest()


# Addresses


@each_row(
    ("address", "host", "port"),
    [
        ("node1:9301", "node1", 9301),
        ("n-1.rack_2.example:1", "n-1.rack_2.example", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@each_row(
    "address",
    [
        *("", "node", "node:", ":1", "node:0", "node:65536", "node:-1", "node:1\n", "no de:1"),
        *("::1:80", "[::1]", "[::1:80", "[node]:1", "-node:1", "a@b:1", "a/b:1", "nodé:1"),
        *("x" * 300 + ":1", "node:\N{ARABIC-INDIC DIGIT ONE}"),
    ],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(UsageError):
        split_address(address)


@each_row("address", ["0.0.0.0:80", "[::]:80", "0:80", "[0:0::0]:80"])
def test_F13_an_address_of_all_interfaces_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="reach") as error:
        split_address(address)
    assert "--advertise" in error.value.advice


@given(st.text(st.sampled_from("ab01.:[]-%@/ \0\n"), max_size=300))
def test_any_text_gives_an_address_or_an_error(text: str) -> None:
    try:
        host, port = split_address(text)
    except UsageError:
        return
    assert host
    assert 0 < port < 1 << 16


# Members and memberships


@each_row(
    "change",
    [
        *({"rank": rank} for rank in (-1, RANK_MAX + 1)),
        *({"instance": instance} for instance in (b"short", bytes(17))),
        *({"version": version} for version in (-1, 1 << 63)),
        *({"certificate": bytes(31)}, {"address": "nowhere"}),
    ],
)
def test_bad_members(change: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        replace(ME, **change)  # type: ignore[arg-type]  # the test passes wrong types on purpose


@given(st.lists(members, max_size=20), st.integers(0, 3))
def test_a_membership_has_each_rank_once_in_order(found: list[Member], version: int) -> None:
    found = [replace(each, rank=each.rank % 8, version=each.version % 4) for each in found]
    membership = Membership.from_members(found, b"s" * 32)
    ranks = [each.rank for each in membership.members]
    assert ranks == sorted({each.rank for each in found})
    assert set(membership.members) <= set(found)
    counting = membership.of_version(version)
    assert counting == tuple(each for each in membership.members if each.version == version)


def test_S8_a_secret_is_not_shown() -> None:
    secret = b"canary" * 6
    kept = MemberRecord(secret=secret)
    shown = f"{Membership.from_members([], secret)!r} {JoinReply(1, 1, secret, None)!r} {kept!r}"
    assert "canary" not in shown
    with pytest.raises(UsageError) as error:
        secret_from_key(b"canary")
    assert "canary" not in str(error.value)


def test_a_key_is_the_same_with_a_newline_at_its_end() -> None:
    key = b"0123456789abcdef"
    assert secret_from_key(key) == secret_from_key(key + b"\n") == hashlib.sha256(key).digest()
    assert secret_from_key(key) != secret_from_key(key + b"1")


# In the registry and in messages


@given(members)
def test_a_packed_member_comes_back(member: Member) -> None:
    assert unpack_member(member.rank, member.instance, pack_member(member)) == member


@given(st.integers(-1, 1 << 17), st.binary(max_size=17), st.binary(max_size=80))
def test_any_bytes_give_a_member_or_an_error(rank: int, instance: bytes, packed: bytes) -> None:
    try:
        unpack_member(rank, instance, packed)
    except UsageError:
        return


@given(members, times, times, secrets)
def test_registration_messages_round_trip(
    me: Member, since: int, state: int, secret: bytes
) -> None:
    answers = MemberRecord(since, state, secret)
    message = unpack(msgpack.packb(join_message(TASK, me, answers)))
    assert parse_join(Fields(message, "join")) == (TASK.name, me, answers)
    message = unpack(msgpack.packb(leave_message(TASK, me)))
    assert parse_leave(Fields(message, "leave")) == (TASK.name, me)


@given(
    st.one_of(st.none(), st.lists(members, max_size=5)), times, times, secrets,
    st.sampled_from(["", "host:5"]), st.booleans(),
)  # fmt: skip
def test_a_registration_answer_comes_back(
    found: list[Member] | None, since: int, state: int, secret: bytes, replaced: str, lost: bool
) -> None:
    members = None if found is None else tuple(found)
    reply = JoinReply(since, state, secret, members, replaced, lost)
    assert parse_join_reply(unpack(msgpack.packb(join_reply_message(reply)))) == reply


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 62), st.binary(max_size=33)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
FIELDS = [*join_message(TASK, ME, MemberRecord()), "members"]


@given(st.dictionaries(st.sampled_from(FIELDS), values))
def test_any_message_gives_a_registration_or_an_error(wrong: dict[str, None]) -> None:
    for parse in (lambda fields: parse_join(Fields(fields, "join")), parse_join_reply):
        message = {**join_message(TASK, ME, MemberRecord(1, 1)), **wrong}
        try:
            parse(message)
        except UsageError:
            continue

"""The member store in Redis, beside the metadata: registrations of the masters of tasks.

A task has two keys in one slot (`storage/metadata/redis/keys.py`). Two atomic Lua scripts decide
everything by Redis's clock alone. If Redis loses its data, the next renewals restore it. Malformed
values count as absent. Any thread, process and forked child.
"""

import contextlib
import functools
import secrets
from typing import Self
from uuid import UUID

from ...errors import BusyError, ConflictError, CorruptError, UsageError
from ...storage.metadata.redis.bucket_scripts import script
from ...storage.metadata.redis.head import open_link
from ...storage.metadata.redis.keys import task_keys
from ...storage.metadata.redis.link import RedisLink, ScriptCommand, Word
from ...storage.metadata.redis.replies import as_count, listed, octets
from ...storage.metadata.store import corrupt_store_error, log
from .membership import (
    MEMBERS_MAX,
    SECRET_BYTES,
    TTL_S,
    JoinReply,
    Member,
    MemberRecord,
    MemberStore,
    TaskName,
    pack_member,
    unpack_member,
)

DEADLINE_S = 2.0
"""If a renewal took longer, the registration could expire before the next one."""

_PREFIX_BYTES = 24  # of a stored registration: instance (16), since (8); then the packed member


# `expire` deletes expired registrations, and with the last one the secret; if the clock jumped
# back, it shortens the others to the lifetime of a new one.
_TASK = """
local function text(number) return string.format('%.0f', number) end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function bump_state()
  local state = tonumber(redis.call('HGET', KEYS[1], 'state') or '') or 0
  redis.call('HSET', KEYS[1], 'state', text(math.max(now, state + 1)))
end
local function delete_if_empty()
  if redis.call('ZCARD', KEYS[2]) > 0 then return false end
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return true
end
local function forget(rank)
  redis.call('ZREM', KEYS[2], rank)
  redis.call('HDEL', KEYS[1], rank)
end
local function expire(ttl)
  local out = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now))
  for _, rank in ipairs(out) do forget(rank) end
  if not delete_if_empty() and #out > 0 then bump_state() end
  local late = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. text(now + ttl), '+inf')
  for _, rank in ipairs(late) do redis.call('ZADD', KEYS[2], text(now + ttl), rank) end
end
local function live_value(rank)
  if not redis.call('ZSCORE', KEYS[2], rank) then return nil end
  local value = redis.call('HGET', KEYS[1], rank)
  if value and #value >= 24 then return value end
end
"""

# KEYS: the task's hash of masters, and the sorted set of their expiry times by rank.
# ARGV: rank, instance, since (0: first registration), packed member, secret to set if there is none
# (or ''), lifetime in us, state that the master knows, greatest number of masters.
# Reply: since, state, secret, packed former master of this rank, whether the caller's registration
# was gone; and if the state has changed, all ranks and values.
JOIN = script(
    _TASK
    + """
local ttl = tonumber(ARGV[6])
expire(ttl)
local before = live_value(ARGV[1])
local since = tonumber(ARGV[3])
if before then
  local theirs = struct.unpack('<I8', before, 17)
  if before:sub(1, 16) == ARGV[2] then since = theirs
  elseif since == 0 then since = math.max(now, theirs + 1)
  elseif since <= theirs then return {'newer'} end
elseif redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[8]) then return {'full'}
elseif since == 0 then since = now end
local value = ARGV[2] .. struct.pack('<I8', since) .. ARGV[4]
redis.call('ZADD', KEYS[2], text(now + ttl), ARGV[1])
if value ~= before then
  redis.call('HSET', KEYS[1], ARGV[1], value)
  bump_state()
end
local secret = redis.call('HGET', KEYS[1], 'secret')
if not secret and ARGV[5] ~= '' then
  secret = ARGV[5]
  redis.call('HSET', KEYS[1], 'secret', secret)
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.ceil(ttl / 1000)) end
local state = redis.call('HGET', KEYS[1], 'state')
local reply = {'ok', text(since), state, secret or '', '', ''}
if before and before:sub(1, 16) ~= ARGV[2] then reply[5] = before:sub(25) end
if not before and tonumber(ARGV[3]) > 0 then reply[6] = 'gone' end
if state ~= ARGV[7] then
  local ranks = redis.call('ZRANGE', KEYS[2], 0, -1)
  reply[7], reply[8] = ranks, redis.call('HMGET', KEYS[1], unpack(ranks))
end
return reply
"""
)

# KEYS: as above. ARGV: rank, instance, lifetime in us
LEAVE = script(
    _TASK
    + """
expire(tonumber(ARGV[3]))
local mine = live_value(ARGV[1])
if not mine or mine:sub(1, 16) ~= ARGV[2] then return {'ok'} end
forget(ARGV[1])
if not delete_if_empty() then bump_state() end
return {'ok'}
"""
)


class RedisMemberStore(MemberStore):
    def __init__(self, link: RedisLink, ttl_s: float = TTL_S) -> None:
        self._link = link
        self._ttl_us = int(ttl_s * 1_000_000)

    @classmethod
    def open(
        cls, url: str, *, store: UUID, deadline_s: float = DEADLINE_S, ttl_s: float = TTL_S
    ) -> Self:
        """`store` is the ID of the object store. Raises as `open_link`."""
        return cls(open_link(url, deadline_s=deadline_s, store=store), ttl_s)

    def __repr__(self) -> str:
        return f"RedisMemberStore({self._link.address})"

    def join(self, task: TaskName, me: Member, record: MemberRecord) -> JoinReply:
        """Also raises MetadataError, BusyError, DeadlineError, NoSpaceError."""
        offered = b"" if me.has_key_file else record.secret or secrets.token_bytes(SECRET_BYTES)
        arguments: list[Word] = [
            me.rank, me.instance, record.since, pack_member(me), offered, self._ttl_us,
            record.state, MEMBERS_MAX,
        ]  # fmt: skip
        reply = self._run(ScriptCommand(JOIN, task_keys(task.digest), arguments))
        match reply[0]:
            case b"newer":
                raise ConflictError(
                    f"a newer master of rank {me.rank} is in task {task.name!r}",
                    advice="give each node a --rank of its own",
                )
            case b"full":
                raise BusyError(f"task {task.name!r} has {MEMBERS_MAX} masters already")
        since, state = as_count(reply[1]), as_count(reply[2])
        secret = b"" if me.has_key_file else octets(reply[3], SECRET_BYTES)
        members = _members(reply[6], reply[7]) if len(reply) > 6 else None
        return JoinReply(since, state, secret, members, _address(me, reply[4]), bool(reply[5]))

    def leave(self, task: TaskName, me: Member) -> None:
        """Raises MetadataError, BusyError, DeadlineError, NoSpaceError."""
        arguments: list[Word] = [me.rank, me.instance, self._ttl_us]
        self._run(ScriptCommand(LEAVE, task_keys(task.digest), arguments))

    def close(self) -> None:
        self._link.close()

    def _run(self, command: ScriptCommand) -> list[object]:
        (reply,) = self._link.with_retries(functools.partial(self._link.run_scripts, [command]))
        fields = listed(reply)
        if not fields:
            raise corrupt_store_error("an empty answer of a script about registrations")
        return fields


def _address(me: Member, packed: object) -> str:
    """Returns "" if there is none, or it is damaged."""
    with contextlib.suppress(UsageError):
        if isinstance(packed, bytes):
            return unpack_member(me.rank, me.instance, packed).address
    return ""


def _members(ranks: object, values: object) -> tuple[Member, ...]:
    found = []
    for rank, value in zip(listed(ranks), listed(values), strict=True):
        try:
            stored = value if isinstance(value, bytes) else b""
            found.append(unpack_member(as_count(rank), stored[:16], stored[_PREFIX_BYTES:]))
        except (UsageError, CorruptError) as error:
            log.warning("a damaged registration is ignored: %s", error.message)
    return tuple(found)

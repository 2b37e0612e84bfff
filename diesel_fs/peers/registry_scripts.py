"""What runs inside Redis over the registrations of one task. Each script is atomic, and touches the
two keys of that task (`storage/metadata/redis/keys.py`), which lie in one slot.

Owned here: who is forgotten and when, which instance of a rank is the newer, and when a task's
secret goes. All of it by Redis's clock: those of masters and servers are nobody's business.
"""

from diesel_fs.storage.metadata.redis.bucket_scripts import script

# What has run out goes, and with the last the secret. A clock that has gone back would make
# registrations last: none does for longer than one that is made now.
_TASK = """
local function text(number) return string.format('%.0f', number) end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function moved()
  local state = tonumber(redis.call('HGET', KEYS[1], 'state') or '') or 0
  redis.call('HSET', KEYS[1], 'state', text(math.max(now, state + 1)))
end
local function emptied()
  if redis.call('ZCARD', KEYS[2]) > 0 then return false end
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return true
end
local function forget(rank)
  redis.call('ZREM', KEYS[2], rank)
  redis.call('HDEL', KEYS[1], rank)
end
local function look(ttl)
  local out = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now))
  for _, rank in ipairs(out) do forget(rank) end
  if not emptied() and #out > 0 then moved() end
  local late = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. text(now + ttl), '+inf')
  for _, rank in ipairs(late) do redis.call('ZADD', KEYS[2], text(now + ttl), rank) end
end
local function held(rank)
  if not redis.call('ZSCORE', KEYS[2], rank) then return nil end
  local value = redis.call('HGET', KEYS[1], rank)
  if value and #value >= 24 then return value end
end
"""

# masters ends | rank instance, since (0: it is new), what is kept of it, secret if there is none
# yet (or nothing), lifetime in us, state that it knows, most masters. Told: since, state, secret,
# what was kept of the master whose place it has taken, whether its own registration was gone
JOIN = script(
    _TASK
    + """
local ttl = tonumber(ARGV[6])
look(ttl)
local before = held(ARGV[1])
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
  moved()
end
local secret = redis.call('HGET', KEYS[1], 'secret')
if not secret and ARGV[5] ~= '' then
  secret = ARGV[5]
  redis.call('HSET', KEYS[1], 'secret', secret)
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.ceil(ttl / 1000)) end
local state = redis.call('HGET', KEYS[1], 'state')
local told = {'ok', text(since), state, secret or '', '', ''}
if before and before:sub(1, 16) ~= ARGV[2] then told[5] = before:sub(25) end
if not before and tonumber(ARGV[3]) > 0 then told[6] = 'gone' end
if state ~= ARGV[7] then
  local ranks = redis.call('ZRANGE', KEYS[2], 0, -1)
  told[7], told[8] = ranks, redis.call('HMGET', KEYS[1], unpack(ranks))
end
return told
"""
)

# masters ends | rank instance, lifetime in us
LEAVE = script(
    _TASK
    + """
look(tonumber(ARGV[3]))
local mine = held(ARGV[1])
if not mine or mine:sub(1, 16) ~= ARGV[2] then return {'ok'} end
forget(ARGV[1])
if not emptied() then moved() end
return {'ok'}
"""
)

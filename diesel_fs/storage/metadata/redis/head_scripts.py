"""Lua scripts that run inside Redis on the head's slot (`keys.py`).

Redis does not undo the first writes of a script that fails, so a script checks all values before it
writes. Redis refuses a write for lack of memory or disk only as a script's first write, which must
therefore be harmless to refuse. A full memory (`maxmemory`) never refuses HDEL: scripts begin with
it if they free memory, or write the small notes without which nothing could be freed.

The comment above a script lists its keys, then its arguments. A reply begins with `ok` or the
reason why nothing was done (`head.py`). Scripts must not compare strings with `<`: Lua would use
the server's locale.
"""

from .bucket_scripts import LESS, script

_CHECK_SCHEMA = """
local schema = redis.call('GET', KEYS[1])
if schema and schema ~= ARGV[1] then return {'schema', schema} end
"""

# Redis makes a run ID at each start, after which data may be lost
_RUN = """
local function run() return redis.call('INFO', 'server'):match('run_id:(%w+)') or '' end
"""

# Redis's clock times locks. One that seems to last longer than `longest` is ignored: the clock went
# back
_TIME = """
local function now_s()
  local now = redis.call('TIME')
  return tonumber(now[1]) + tonumber(now[2]) / 1000000
end
local function is_held(key, longest)
  local now = now_s()
  for _, until_text in ipairs(redis.call('HVALS', key)) do
    local left = (tonumber(until_text) or 0) - now
    if left >= 0 and left <= longest then return true end
  end
  return false
end
"""

# Lists a generation in `dead`, so that a later clean-up removes it
_CONDEMN = """
local function condemn(generation, packed_buckets)
  local buckets = tonumber(packed_buckets or '') or 0
  if generation and buckets >= 1 and buckets <= 16384 then
    redis.call('HSET', KEYS[3], generation,
      struct.pack('<c1I8I4', 'x', redis.call('TIME')[1], buckets))
  end
end
"""

# schema head pending counts | schema
READ_HEAD = script(
    _CHECK_SCHEMA
    + """
local head = redis.call('HGETALL', KEYS[2])
if #head == 0 then return {'none'} end
return {'ok', head, redis.call('LRANGE', KEYS[3], 0, -1), redis.call('HGETALL', KEYS[4])}
"""
)

# schema names head | schema name identity generation buckets
CREATE = script(
    _CHECK_SCHEMA
    + _RUN
    + """
local identity = redis.call('HGET', KEYS[2], ARGV[2])
local name = redis.call('HGET', KEYS[3], 'name')
if identity or name then
  if identity == ARGV[3] and name == ARGV[2] then return {'ok'} end
  return {'conflict', name or ARGV[2], (not name) and identity or ARGV[3]}
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[3], 'name', ARGV[2], 'generation', ARGV[4], 'buckets', ARGV[5],
  'version', '0', 'first', '0', 'files', '0', 'bytes', '0', 'chunks', '0', 'run', run(),
  'digest', string.rep('\\0', 16), 'newest', string.rep('\\0', 16))
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return {'ok'}
"""
)

# schema names dead head chunks counts pending begun locks | schema
DROP = script(
    _CHECK_SCHEMA
    + _CONDEMN
    + """
local old = redis.call('HMGET', KEYS[4], 'name', 'generation', 'buckets')
if not old[1] then return {'ok'} end
redis.call('HDEL', KEYS[2], old[1])
redis.call('UNLINK', unpack(KEYS, 4))
condemn(old[2], old[3])
return {'ok'}
"""
)

# schema head chunks begun | schema generation transaction changes frees, chunk...
# `changes` are packed (`keys.Changes`); the scripts call them the transaction's plan.
# `frees`: 1 for a transaction that a full memory must not refuse, else 0. Returns the version, for
# each chunk whether it is known, and the number of transactions that have begun
BEGIN = script(
    _CHECK_SCHEMA
    + """
local head = redis.call('HMGET', KEYS[2], 'generation', 'version')
if not head[1] then return {'none'} end
if head[1] ~= ARGV[2] then return {'moved'} end
local flags, new = {}, false
for i = 6, #ARGV do
  flags[i - 5] = redis.call('HEXISTS', KEYS[3], ARGV[i])
  new = new or flags[i - 5] == 0
end
if new then
  if ARGV[5] == '1' then redis.call('HDEL', KEYS[4], ARGV[3]) end
  redis.call('HSET', KEYS[4], ARGV[3],
    struct.pack('<c1I8', 'b', redis.call('TIME')[1]) .. ARGV[4])
end
return {'ok', head[2], flags, redis.call('HLEN', KEYS[4])}
"""
)

# schema head chunks pending begun locks counts |
# schema generation transaction changes frees, clock in us, run or nothing, longest lock,
# count of buckets, (bucket, pieces)..., (chunk, record or nothing, digest)...
# Adds chunks to a dataset, or removes those without a record (their digest is 2^128 less the
# chunk's). Returns the new version and the number of pending changes. After a restart of Redis,
# only a writer that names the new run, because it is going to confirm it, can commit
COMMIT = script(
    _CHECK_SCHEMA
    + LESS
    + _RUN
    + _TIME
    + """
local head =
  redis.call('HMGET', KEYS[2], 'generation', 'version', 'digest', 'newest', 'chunks', 'run')
if not head[1] then return {'none'} end
if head[1] ~= ARGV[2] then return {'moved'} end
for _, text in ipairs({head[2], head[5]}) do
  if not text or not text:match('^%d+$') or #text > 18 then return {'damaged'} end
end
if not (head[3] and #head[3] == 16 and head[4] and #head[4] == 16) then return {'damaged'} end
local current = run()
if current ~= (ARGV[7] ~= '' and ARGV[7] or head[6]) then return {'restarted', current} end
local begun = redis.call('HGET', KEYS[5], ARGV[3])
if not begun or begun:byte(1) ~= 98 then return {'moved'} end
local first = 10 + 2 * ARGV[9]
for i = first, #ARGV, 3 do
  local is_removal, is_known = ARGV[i + 1] == '', redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1
  if is_removal ~= is_known or (is_removal and ARGV[i] == head[4]) then return {'moved'} end
end
for i = 10, first - 1, 2 do
  local pieces = redis.call('HGET', KEYS[7], 'n' .. ARGV[i])
  if pieces and not pieces:match('^%d+$') then return {'damaged'} end
end
redis.call('LLEN', KEYS[4])
if is_held(KEYS[6], tonumber(ARGV[8])) then return {'held'} end
local version = string.format('%.0f', math.max(tonumber(head[2]) + 1, tonumber(ARGV[6])))
local digest, newest, chunks = {head[3]:byte(1, 16)}, head[4], 0
if ARGV[5] == '1' then redis.call('HDEL', KEYS[5], ARGV[3]) end
redis.call('HSET', KEYS[2], 'version', version)
for i = first, #ARGV, 3 do
  local carry = 0
  for at = 16, 1, -1 do
    local sum = digest[at] + ARGV[i + 2]:byte(at) + carry
    digest[at], carry = sum % 256, math.floor(sum / 256)
  end
  local record = ARGV[i + 1]
  if record == '' then
    redis.call('HDEL', KEYS[3], ARGV[i])
    chunks = chunks - 1
  else
    if less(newest, ARGV[i]) then newest = ARGV[i] end
    record = record:sub(1, 20) .. struct.pack('<I8', tonumber(version)) .. record:sub(29)
    redis.call('HSET', KEYS[3], ARGV[i], record)
    chunks = chunks + 1
  end
end
redis.call('HINCRBY', KEYS[2], 'chunks', chunks)
redis.call('HSET', KEYS[2], 'digest', string.char(unpack(digest)), 'newest', newest)
for i = 10, first - 1, 2 do redis.call('HINCRBY', KEYS[7], 'n' .. ARGV[i], ARGV[i + 1]) end
redis.call('RPUSH', KEYS[4], ARGV[4])
redis.call('HDEL', KEYS[5], ARGV[3])
return {'ok', version, redis.call('LLEN', KEYS[4])}
"""
)

# schema head | schema
# Returns the run ID of this Redis, or nothing if it is the one that was confirmed last
NEEDS_REPAIR = script(
    _CHECK_SCHEMA
    + _RUN
    + """
local confirmed = redis.call('HGET', KEYS[2], 'run')
if not confirmed and redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local current = run()
if current == confirmed then return {'ok', ''} end
return {'ok', current}
"""
)

# schema head | schema run
# Records that this run of Redis has lost nothing of the dataset
CONFIRM = script(
    _CHECK_SCHEMA
    + _RUN
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local current = run()
if current ~= ARGV[2] then return {'restarted', current} end
redis.call('HDEL', KEYS[2], 'run')  -- a full memory does not refuse it, nor later writes
redis.call('HSET', KEYS[2], 'run', current)
return {'ok'}
"""
)

# schema head pending counts | schema generation changes, (bucket, pieces, files, bytes)...
# Removes the changes from the pending ones, and adds to the head's counts what the buckets' counts
# have grown by. Counts of fewer pieces than an earlier report are out of date, and are ignored
APPLIED = script(
    _CHECK_SCHEMA
    + """
local head = redis.call('HMGET', KEYS[2], 'generation', 'files', 'bytes')
if head[1] ~= ARGV[2] then return {'moved'} end
local news = {}
for i = 4, #ARGV, 4 do
  local counts = redis.call('HGET', KEYS[4], ARGV[i]) or '0 0 0'
  local pieces, files, bytes = counts:match('^(%d+) (%d+) (%d+)$')
  if not pieces or not (head[2] or ''):match('^%d+$') or not (head[3] or ''):match('^%d+$') then
    return {'damaged'}
  end
  if tonumber(ARGV[i + 1]) > tonumber(pieces) then news[#news + 1] = {i, files, bytes} end
end
redis.call('LREM', KEYS[3], 1, ARGV[3])
for _, new in ipairs(news) do
  local i, files, bytes = unpack(new)
  redis.call('HSET', KEYS[4], ARGV[i], table.concat({ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]}, ' '))
  redis.call('HINCRBY', KEYS[2], 'files', ARGV[i + 2])
  redis.call('HINCRBY', KEYS[2], 'bytes', ARGV[i + 3])
  -- As text: Lua's numbers are not exact beyond 2^53. Redis does not accept "-0"
  if files ~= '0' then redis.call('HINCRBY', KEYS[2], 'files', '-' .. files) end
  if bytes ~= '0' then redis.call('HINCRBY', KEYS[2], 'bytes', '-' .. bytes) end
end
return {'ok'}
"""
)

# schema head locks | schema token seconds longest
LOCK_COMMITS = script(
    _CHECK_SCHEMA
    + _TIME
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local now, longest = now_s(), tonumber(ARGV[4])
local held = redis.call('HGETALL', KEYS[3])
redis.call('HDEL', KEYS[3], ARGV[2])  -- a full memory does not refuse it, nor later writes
redis.call('HSET', KEYS[3], ARGV[2], string.format('%.6f', now + tonumber(ARGV[3])))
for i = 1, #held, 2 do
  local left = (tonumber(held[i + 1]) or 0) - now
  if left < 0 or left > longest then redis.call('HDEL', KEYS[3], held[i]) end
end
return {'ok'}
"""
)

# schema begun | schema transaction age
# A transaction that is at least `age` seconds old can no longer commit. Returns its changes
ABANDON = script(
    _CHECK_SCHEMA
    + """
local begun = redis.call('HGET', KEYS[2], ARGV[2])
if not begun then return {'none'} end
local now, plan = redis.call('TIME')[1], begun:sub(10)
if #begun >= 9 and now - struct.unpack('<I8', begun, 2) < tonumber(ARGV[3]) then
  return {'young'}
end
redis.call('HDEL', KEYS[2], ARGV[2])  -- a full memory does not refuse it, nor later writes
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<c1I8', 'x', now) .. plan)
return {'ok', plan}
"""
)

# schema dead | schema generation buckets
# The heartbeat of a rebuild. Returns the run ID of this Redis
HEARTBEAT = script(
    _CHECK_SCHEMA
    + _RUN
    + """
redis.call('HSET', KEYS[2], ARGV[2],
  struct.pack('<c1I8I4', 'b', redis.call('TIME')[1], ARGV[3]))
return {'ok', run()}
"""
)

# schema dead | schema generation age
# A generation whose heartbeat is at least `age` seconds old can no longer become live. Returns
# for how many seconds it has been abandoned
CLAIM_ABANDONED = script(
    _CHECK_SCHEMA
    + """
local state = redis.call('HGET', KEYS[2], ARGV[2])
if not state then return {'none'} end
local now, since = tonumber(redis.call('TIME')[1]), 0
if #state == 13 then since = struct.unpack('<I8', state, 2) end
if state:byte(1) ~= 98 then return {'ok', now - since} end
if now - since < tonumber(ARGV[3]) then return {'young'} end
redis.call('HDEL', KEYS[2], ARGV[2])  -- a full memory does not refuse it, nor later writes
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<c1I8', 'x', now) .. state:sub(10))
return {'ok', 0}
"""
)

# schema names dead head chunks counts pending begun locks built |
# schema name identity generation buckets, old generation, old version,
# new version, files bytes chunks digest newest, run, (bucket, counts)...
# Makes the generation the dataset's live state. `built` has its chunks
REPLACE_LIVE = script(
    _CHECK_SCHEMA
    + _RUN
    + _CONDEMN
    + """
local identity = redis.call('HGET', KEYS[2], ARGV[2])
if identity and #identity ~= 16 then identity = false end
local old = redis.pcall('HMGET', KEYS[4], 'name', 'generation', 'version', 'buckets')
if old.err then old = {} end
if (identity and identity ~= ARGV[3]) or (old[1] and old[1] ~= ARGV[2]) then
  return {'conflict', old[1] or ARGV[2], (not old[1]) and identity or ARGV[3]}
end
if (old[2] or '') ~= ARGV[6] or (old[3] or '0') ~= ARGV[7] then return {'moved'} end
local state = redis.call('HGET', KEYS[3], ARGV[4])
if not state or state:byte(1) ~= 98 then return {'lost'} end
if ARGV[11] ~= '0' and redis.call('EXISTS', KEYS[10]) == 0 then return {'lost'} end
if run() ~= ARGV[14] then return {'lost'} end
local version = ARGV[8]
redis.call('HDEL', KEYS[3], ARGV[4])
redis.call('UNLINK', unpack(KEYS, 4, 9))
redis.call('HSET', KEYS[4], 'name', ARGV[2], 'generation', ARGV[4], 'buckets', ARGV[5],
  'version', version, 'first', version, 'files', ARGV[9], 'bytes', ARGV[10],
  'chunks', ARGV[11], 'digest', ARGV[12], 'newest', ARGV[13], 'run', ARGV[14])
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if ARGV[11] ~= '0' then redis.call('RENAME', KEYS[10], KEYS[5]) end
for i = 15, #ARGV, 2 do
  redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1], 'n' .. ARGV[i], ARGV[i + 1]:match('%d+'))
end
condemn(old[2], old[4])
return {'ok', version}
"""
)

# schema users | schema, expected token, new token, (user, account or nothing)...
# Changes accounts, if the token of their state is the expected one
SET_USERS = script(
    _CHECK_SCHEMA
    + """
local token = redis.call('HGET', KEYS[2], '=') or ''
if token == ARGV[3] then return {'ok'} end  -- it was sent twice
if token ~= ARGV[2] then return {'moved'} end
for i = 4, #ARGV, 2 do  -- the caller sends removals first: a full memory does not refuse them
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', KEYS[2], '=', ARGV[3])
redis.call('SET', KEYS[1], ARGV[1])
return {'ok'}
"""
)

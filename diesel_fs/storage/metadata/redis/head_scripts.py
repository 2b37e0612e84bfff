"""What runs inside Redis over the heads of datasets: compare and set. Each script is atomic.

Owned here: what is decided in the head's slot. Not owned: the fold (`bucket_scripts.py`).
A script that has written once is never stopped for want of memory or disk, so each starts with a
write that refuses nothing but the whole script; and one that fails in its middle stays half done,
so what it relies on is looked at before that.

Strings must not be compared with `<` in here: Lua asks the locale of the server then.
"""

from diesel_fs.storage.metadata.redis.bucket_scripts import LESS, script

_CHECK_SCHEMA = """
local schema = redis.call('GET', KEYS[1])
if schema and schema ~= ARGV[1] then return {'schema', schema} end
"""

# The run of Redis that answers: another one may have lost what the last one knew
_RUN = """
local function run() return redis.call('INFO', 'server'):match('run_id:(%w+)') or '' end
"""

# By Redis's clock alone. What seems to last longer than any may last: the clock has gone back
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

_CHECK_HEAD = """
local function is_whole(marker)
  for _, text in ipairs({marker[2], marker[5]}) do
    if not text or not text:match('^%d+$') or #text > 18 then return false end
  end
  return marker[3] and #marker[3] == 16 and marker[4] and #marker[4] == 16
end
"""

# schema marker unapplied tallies | schema
READ_HEAD = script(
    _CHECK_SCHEMA
    + """
local marker = redis.call('HGETALL', KEYS[2])
if #marker == 0 then return {'none'} end
return {'ok', marker, redis.call('LRANGE', KEYS[3], 0, -1), redis.call('HGETALL', KEYS[4])}
"""
)

# schema names marker | schema name identity generation buckets
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

# schema names dead marker chunks tallies unapplied begun holds | schema
DROP = script(
    _CHECK_SCHEMA
    + """
local old = redis.call('HMGET', KEYS[4], 'name', 'generation', 'buckets')
if not old[1] then return {'ok'} end
local buckets = tonumber(old[3] or '') or 0
redis.call('HDEL', KEYS[2], old[1])
redis.call('UNLINK', unpack(KEYS, 4))
if old[2] and buckets >= 1 and buckets <= 16384 then
  redis.call('HSET', KEYS[3], old[2],
    struct.pack('<c1I8I4', 'x', redis.call('TIME')[1], buckets))
end
return {'ok'}
"""
)

# schema marker chunks begun | schema generation transaction plan, chunk...
BEGIN = script(
    _CHECK_SCHEMA
    + """
local marker = redis.call('HMGET', KEYS[2], 'generation', 'version')
if not marker[1] then return {'none'} end
if marker[1] ~= ARGV[2] then return {'moved'} end
local flags, new = {}, false
for i = 5, #ARGV do
  flags[i - 4] = redis.call('HEXISTS', KEYS[3], ARGV[i])
  new = new or flags[i - 4] == 0
end
if new then
  redis.call('HSET', KEYS[4], ARGV[3],
    struct.pack('<c1I8', 'b', redis.call('TIME')[1]) .. ARGV[4])
end
return {'ok', marker[2], flags, redis.call('HLEN', KEYS[4])}
"""
)

# schema marker chunks unapplied begun holds tallies |
# schema generation transaction plan, clock in us, run or nothing, longest hold,
# count of buckets, (bucket, pieces)..., (chunk, record, digest)...
# Under another run than the one that was vouched for, only who says that this is it may commit
COMMIT = script(
    _CHECK_SCHEMA
    + LESS
    + _RUN
    + _TIME
    + _CHECK_HEAD
    + """
local marker =
  redis.call('HMGET', KEYS[2], 'generation', 'version', 'digest', 'newest', 'chunks', 'run')
if not marker[1] then return {'none'} end
if marker[1] ~= ARGV[2] then return {'moved'} end
if not is_whole(marker) then return {'damaged'} end
local current = run()
if current ~= (ARGV[6] ~= '' and ARGV[6] or marker[6]) then return {'restarted', current} end
local first = 9 + 2 * ARGV[8]
local begun = redis.call('HGET', KEYS[5], ARGV[3])
if not begun or begun:byte(1) ~= 98 then return {'moved'} end
for i = first, #ARGV, 3 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1 then return {'moved'} end
end
for i = 9, first - 1, 2 do
  local told = redis.call('HGET', KEYS[7], 'n' .. ARGV[i])
  if told and not told:match('^%d+$') then return {'damaged'} end
end
redis.call('LLEN', KEYS[4])
if is_held(KEYS[6], tonumber(ARGV[7])) then return {'held'} end
local version = math.max(tonumber(marker[2]) + 1, tonumber(ARGV[5]))
version = string.format('%.0f', version)
local digest, newest = {marker[3]:byte(1, 16)}, marker[4]
redis.call('HSET', KEYS[2], 'version', version)
local chunks = 0
for i = first, #ARGV, 3 do
  local carry, more = 0, ARGV[i + 2]
  for at = 16, 1, -1 do
    local sum = digest[at] + more:byte(at) + carry
    digest[at], carry = sum % 256, math.floor(sum / 256)
  end
  if less(newest, ARGV[i]) then newest = ARGV[i] end
  local record = ARGV[i + 1]
  record = record:sub(1, 20) .. struct.pack('<I8', tonumber(version)) .. record:sub(29)
  redis.call('HSET', KEYS[3], ARGV[i], record)
  chunks = chunks + 1
end
redis.call('HINCRBY', KEYS[2], 'chunks', chunks)
redis.call('HSET', KEYS[2], 'digest', string.char(unpack(digest)), 'newest', newest)
for i = 9, first - 1, 2 do redis.call('HINCRBY', KEYS[7], 'n' .. ARGV[i], ARGV[i + 1]) end
redis.call('RPUSH', KEYS[4], ARGV[4])
redis.call('HDEL', KEYS[5], ARGV[3])
return {'ok', version, redis.call('LLEN', KEYS[4])}
"""
)

# schema marker | schema: the run, unless it is the one that was vouched for
NEEDS_REPAIR = script(
    _CHECK_SCHEMA
    + _RUN
    + """
local vouched = redis.call('HGET', KEYS[2], 'run')
if not vouched and redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local current = run()
if current == vouched then return {'ok', ''} end
return {'ok', current}
"""
)

# schema marker | schema run: what that run knows of the dataset is all there is
CONFIRM = script(
    _CHECK_SCHEMA
    + _RUN
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local current = run()
if current ~= ARGV[2] then return {'restarted', current} end
redis.call('HSET', KEYS[2], 'run', current)
return {'ok'}
"""
)

# schema marker unapplied tallies | schema generation plan, (bucket, pieces, files, bytes)...
APPLIED = script(
    _CHECK_SCHEMA
    + """
local marker = redis.call('HMGET', KEYS[2], 'generation', 'files', 'bytes')
if marker[1] ~= ARGV[2] then return {'moved'} end
local news = {}
for i = 4, #ARGV, 4 do
  local told = redis.call('HGET', KEYS[4], ARGV[i]) or '0 0 0'
  local pieces, files, bytes = told:match('^(%d+) (%d+) (%d+)$')
  if not pieces or not (marker[2] or ''):match('^%d+$') or not (marker[3] or ''):match('^%d+$') then
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
  -- As text, since numbers are not exact here beyond 2^53; and "-0" is no number there
  if files ~= '0' then redis.call('HINCRBY', KEYS[2], 'files', '-' .. files) end
  if bytes ~= '0' then redis.call('HINCRBY', KEYS[2], 'bytes', '-' .. bytes) end
end
return {'ok'}
"""
)

# schema marker holds | schema token seconds longest
LOCK_COMMITS = script(
    _CHECK_SCHEMA
    + _TIME
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local now, longest = now_s(), tonumber(ARGV[4])
local held = redis.call('HGETALL', KEYS[3])
redis.call('HSET', KEYS[3], ARGV[2], string.format('%.6f', now + tonumber(ARGV[3])))
for i = 1, #held, 2 do
  local left = (tonumber(held[i + 1]) or 0) - now
  if left < 0 or left > longest then redis.call('HDEL', KEYS[3], held[i]) end
end
return {'ok'}
"""
)

# schema begun | schema transaction age: takes away the right to commit, where it is that old
ABANDON = script(
    _CHECK_SCHEMA
    + """
local begun = redis.call('HGET', KEYS[2], ARGV[2])
if not begun then return {'none'} end
local now, plan = redis.call('TIME')[1], begun:sub(10)
if #begun >= 9 and now - struct.unpack('<I8', begun, 2) < tonumber(ARGV[3]) then
  return {'young'}
end
redis.call('HDEL', KEYS[2], ARGV[2])  -- which no full memory refuses, nor what comes after it
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<c1I8', 'x', now) .. plan)
return {'ok', plan}
"""
)

# schema dead | schema generation buckets: says that it is being built, again every minute
HEARTBEAT = script(
    _CHECK_SCHEMA
    + _RUN
    + """
redis.call('HSET', KEYS[2], ARGV[2],
  struct.pack('<c1I8I4', 'b', redis.call('TIME')[1], ARGV[3]))
return {'ok', run()}
"""
)

# schema dead | schema generation age: takes away the right to become the state, if it is that old
CLAIM_ABANDONED = script(
    _CHECK_SCHEMA
    + """
local state = redis.call('HGET', KEYS[2], ARGV[2])
if not state then return {'none'} end
local now, since = tonumber(redis.call('TIME')[1]), 0
if #state == 13 then since = struct.unpack('<I8', state, 2) end
if state:byte(1) ~= 98 then return {'ok', now - since} end
if now - since < tonumber(ARGV[3]) then return {'young'} end
redis.call('HDEL', KEYS[2], ARGV[2])  -- which no full memory refuses, nor what comes after it
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<c1I8', 'x', now) .. state:sub(10))
return {'ok', 0}
"""
)

# schema names dead marker chunks tallies unapplied begun holds built |
# schema name identity generation buckets, old generation, old version,
# clock in us, files bytes chunks digest newest, run, (bucket, tally)...
REPLACE_LIVE = script(
    _CHECK_SCHEMA
    + _RUN
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
local buckets = tonumber(old[4] or '') or 0
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
if old[2] and buckets >= 1 and buckets <= 16384 then
  redis.call('HSET', KEYS[3], old[2],
    struct.pack('<c1I8I4', 'x', redis.call('TIME')[1], buckets))
end
return {'ok', version}
"""
)

# schema users | schema, expected token, new token, (user, account or nothing)...
SET_USERS = script(
    _CHECK_SCHEMA
    + """
local token = redis.call('HGET', KEYS[2], '=') or ''
if token == ARGV[3] then return {'ok'} end  -- sent again
if token ~= ARGV[2] then return {'moved'} end
for i = 4, #ARGV, 2 do  -- removals first: they are not refused where the memory is full
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

# schema marker chunks unapplied begun holds |
# schema generation transaction plan, clock in us, longest hold,
# (chunk, what is added to the digest in place of taking its own away)...
FORGET = script(
    _CHECK_SCHEMA
    + _RUN
    + _TIME
    + _CHECK_HEAD
    + """
local marker =
  redis.call('HMGET', KEYS[2], 'generation', 'version', 'digest', 'newest', 'chunks', 'run')
if not marker[1] then return {'none'} end
if marker[1] ~= ARGV[2] then return {'moved'} end
if not is_whole(marker) then return {'damaged'} end
local current = run()
if current ~= marker[6] then return {'restarted', current} end
local begun = redis.call('HGET', KEYS[5], ARGV[3])
if not begun or begun:byte(1) ~= 98 then return {'moved'} end
for i = 7, #ARGV, 2 do
  if ARGV[i] == marker[4] or redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
    return {'moved'}
  end
end
redis.call('LLEN', KEYS[4])
if is_held(KEYS[6], tonumber(ARGV[6])) then return {'held'} end
local version = math.max(tonumber(marker[2]) + 1, tonumber(ARGV[5]))
version = string.format('%.0f', version)
local digest, chunks = {marker[3]:byte(1, 16)}, 0
redis.call('HSET', KEYS[2], 'version', version)
for i = 7, #ARGV, 2 do
  local carry, more = 0, ARGV[i + 1]
  for at = 16, 1, -1 do
    local sum = digest[at] + more:byte(at) + carry
    digest[at], carry = sum % 256, math.floor(sum / 256)
  end
  redis.call('HDEL', KEYS[3], ARGV[i])
  chunks = chunks + 1
end
redis.call('HINCRBY', KEYS[2], 'chunks', -chunks)
redis.call('HSET', KEYS[2], 'digest', string.char(unpack(digest)))
redis.call('RPUSH', KEYS[4], ARGV[4])
redis.call('HDEL', KEYS[5], ARGV[3])
return {'ok', version}
"""
)

"""What runs inside Redis: each script is atomic, and touches the keys of one slot, all declared.

Owned here: the fold over pieces (`APPLY`; FORMAT.md, section 5) and the head's compare-and-set.
A script that has written once is never stopped for want of memory or disk, so each starts with a
write that refuses nothing but the whole script.

Strings must not be compared with `<` in here: Lua asks the locale of the server then.
"""

from hashlib import sha1
from typing import NamedTuple


class Script(NamedTuple):
    """A script and the name by which Redis knows it."""

    source: bytes
    sha: bytes


def _script(source: str) -> Script:
    packed = source.encode()
    return Script(packed, sha1(packed, usedforsecurity=False).hexdigest().encode())


_HEAD = """
local schema = redis.call('GET', KEYS[1])
if schema and schema ~= ARGV[1] then return {'schema', schema} end
"""

_LESS = """
local function less(a, b)
  for i = 1, #a do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return false
end
"""

# schema marker unapplied tallies | schema
LOOK = _script(
    _HEAD
    + """
local marker = redis.call('HGETALL', KEYS[2])
if #marker == 0 then return {'none'} end
return {'ok', marker, redis.call('LRANGE', KEYS[3], 0, -1), redis.call('HGETALL', KEYS[4])}
"""
)

# schema names marker | schema name identity generation buckets
CREATE = _script(
    _HEAD
    + """
local identity = redis.call('HGET', KEYS[2], ARGV[2])
local name = redis.call('HGET', KEYS[3], 'name')
if identity or name then
  if identity == ARGV[3] and name == ARGV[2] then return {'ok'} end
  return {'conflict', name or ARGV[2], (not name) and identity or ARGV[3]}
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[3], 'name', ARGV[2], 'generation', ARGV[4], 'buckets', ARGV[5],
  'version', '0', 'first', '0', 'files', '0', 'bytes', '0', 'chunks', '0',
  'digest', string.rep('\\0', 16), 'newest', string.rep('\\0', 16))
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return {'ok'}
"""
)

# schema names dead marker chunks tallies unapplied begun holds | schema
DROP = _script(
    _HEAD
    + """
local old = redis.call('HMGET', KEYS[4], 'name', 'generation', 'buckets')
if not old[1] then return {'ok'} end
redis.call('HDEL', KEYS[2], old[1])
redis.call('UNLINK', unpack(KEYS, 4))
redis.call('HSET', KEYS[3], old[2],
  struct.pack('<c1I8I4', 'x', redis.call('TIME')[1], old[3]))
return {'ok'}
"""
)

# schema marker chunks begun | schema generation transaction plan, chunk...
BEGIN = _script(
    _HEAD
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
# schema generation transaction plan, clock in us and s, longest hold,
# count of buckets, (bucket, pieces)..., (chunk, record, digest)...
COMMIT = _script(
    _HEAD
    + _LESS
    + """
local marker = redis.call('HMGET', KEYS[2], 'generation', 'version', 'digest', 'newest')
if not marker[1] then return {'none'} end
if marker[1] ~= ARGV[2] then return {'moved'} end
local first = 9 + 2 * ARGV[8]
local begun = redis.call('HGET', KEYS[5], ARGV[3])
if not begun or begun:byte(1) ~= 98 then return {'moved'} end
for i = first, #ARGV, 3 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1 then return {'moved'} end
end
local now, longest = tonumber(ARGV[6]), tonumber(ARGV[7])
for _, until_text in ipairs(redis.call('HVALS', KEYS[6])) do
  local left = tonumber(until_text) - now
  if left >= 0 and left <= longest then return {'held'} end
end
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

# schema marker unapplied tallies | schema generation plan, (bucket, pieces, files, bytes)...
APPLIED = _script(
    _HEAD
    + """
if redis.call('HGET', KEYS[2], 'generation') ~= ARGV[2] then return {'moved'} end
redis.call('LREM', KEYS[3], 1, ARGV[3])
for i = 4, #ARGV, 4 do
  local told = redis.call('HGET', KEYS[4], ARGV[i]) or '0 0 0'
  local pieces, files, bytes = told:match('(%d+) (%d+) (%d+)')
  if tonumber(ARGV[i + 1]) > tonumber(pieces) then
    redis.call('HSET', KEYS[4], ARGV[i], table.concat({ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]}, ' '))
    redis.call('HINCRBY', KEYS[2], 'files', ARGV[i + 2])
    redis.call('HINCRBY', KEYS[2], 'bytes', ARGV[i + 3])
    -- As text, since numbers are not exact here beyond 2^53; and "-0" is no number there
    if files ~= '0' then redis.call('HINCRBY', KEYS[2], 'files', '-' .. files) end
    if bytes ~= '0' then redis.call('HINCRBY', KEYS[2], 'bytes', '-' .. bytes) end
  end
end
return {'ok'}
"""
)

# schema marker holds | schema token until now longest
HOLD = _script(
    _HEAD
    + """
if redis.call('EXISTS', KEYS[2]) == 0 then return {'none'} end
local now, longest = tonumber(ARGV[4]), tonumber(ARGV[5])
local held = redis.call('HGETALL', KEYS[3])
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
for i = 1, #held, 2 do
  local left = tonumber(held[i + 1]) - now
  if left < 0 or left > longest then redis.call('HDEL', KEYS[3], held[i]) end
end
return {'ok'}
"""
)

# schema begun | schema transaction age: takes away the right to commit, where it is that old
ABANDON = _script(
    _HEAD
    + """
local begun = redis.call('HGET', KEYS[2], ARGV[2])
if not begun then return {'none'} end
local now = tonumber(redis.call('TIME')[1])
if now - struct.unpack('<I8', begun, 2) < tonumber(ARGV[3]) then return {'young'} end
redis.call('HSET', KEYS[2], ARGV[2], 'x' .. begun:sub(2))
return {'ok', begun:sub(10)}
"""
)

# schema dead | schema generation buckets: says that it is being built, again every minute
BUILD = _script(
    _HEAD
    + """
redis.call('HSET', KEYS[2], ARGV[2],
  struct.pack('<c1I8I4', 'b', redis.call('TIME')[1], ARGV[3]))
return {'ok'}
"""
)

# schema dead | schema generation age: takes away the right to become the state, if it is that old
CONDEMN = _script(
    _HEAD
    + """
local state = redis.call('HGET', KEYS[2], ARGV[2])
if not state then return {'none'} end
local now = tonumber(redis.call('TIME')[1])
if state:byte(1) == 98 and now - struct.unpack('<I8', state, 2) < tonumber(ARGV[3]) then
  return {'young'}
end
if state:byte(1) == 98 then
  redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<c1I8', 'x', now) .. state:sub(10))
end
local age = now - struct.unpack('<I8', redis.call('HGET', KEYS[2], ARGV[2]), 2)
return {'ok', age}
"""
)

# schema names dead marker chunks tallies unapplied begun holds built |
# schema name identity generation buckets, old generation, old version,
# clock in us, files bytes chunks digest newest, (bucket, tally)...
SWITCH = _script(
    _HEAD
    + """
local identity = redis.call('HGET', KEYS[2], ARGV[2])
local old = redis.call('HMGET', KEYS[4], 'name', 'generation', 'version', 'buckets')
if (identity and identity ~= ARGV[3]) or (old[1] and old[1] ~= ARGV[2]) then
  return {'conflict', old[1] or ARGV[2], (not old[1]) and identity or ARGV[3]}
end
if (old[2] or '') ~= ARGV[6] or (old[3] or '0') ~= ARGV[7] then return {'moved'} end
local state = redis.call('HGET', KEYS[3], ARGV[4])
if not state or state:byte(1) ~= 98 then return {'lost'} end
if ARGV[11] ~= '0' and redis.call('EXISTS', KEYS[10]) == 0 then return {'lost'} end
local version = tonumber(ARGV[7])
if ARGV[11] ~= '0' then version = math.max(version + 1, tonumber(ARGV[8])) end
version = string.format('%.0f', version)
redis.call('HSET', KEYS[4], 'name', ARGV[2], 'generation', ARGV[4], 'buckets', ARGV[5],
  'version', version, 'first', version, 'files', ARGV[9], 'bytes', ARGV[10],
  'chunks', ARGV[11], 'digest', ARGV[12], 'newest', ARGV[13])
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('UNLINK', unpack(KEYS, 5, 9))
if ARGV[11] ~= '0' then redis.call('RENAME', KEYS[10], KEYS[5]) end
for i = 14, #ARGV, 2 do
  redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1], 'n' .. ARGV[i], ARGV[i + 1]:match('%d+'))
end
redis.call('HDEL', KEYS[3], ARGV[4])
if old[2] then
  redis.call('HSET', KEYS[3], old[2],
    struct.pack('<c1I8I4', 'x', redis.call('TIME')[1], old[4]))
end
return {'ok', version}
"""
)

# schema users | schema, expected token, new token, (user, account or nothing)...
SET_USERS = _script(
    _HEAD
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

# x n t h d f p q, (e s) of each folder | field in x, field in n, [the piece itself]
# Numbers in a piece are little-endian. A piece is: count of folders (u16), so many folders (16),
# then steps, each with the position of its folder (u16):
#   F parent (16) name        the folder and its place in the tree, for the index
#   S name                    a folder below
#   N count (u16), files, tombstones (u32), bytes (u64), then (name, entry of 64) so often:
#     regular: each name once, of one extent, not moved; the sums are those of them all
#   G moved (u8), name, length of the entry (u32), entry
#   H chunk (16), place (u32): a hole from the start (its folder means nothing)
# A name is its length (u8) and its bytes. At the end: U, paths for `n`.
APPLY = _script(
    _LESS
    + """
local X, N, T, H, D, F, P, Q = unpack(KEYS, 1, 8)
local call, pack, take = redis.call, struct.pack, struct.unpack
if call('HEXISTS', N, ARGV[2]) == 1 then
  call('HDEL', X, ARGV[1])
  return call('HMGET', T, 'pieces', 'files', 'bytes')
end
local piece = ARGV[3]
if not piece then
  piece = call('HGET', X, ARGV[1])
  if not piece then return false end
end
local count = (take('<I2', piece))
if #KEYS ~= 8 + 2 * count then return redis.error_reply('ERR a piece of other folders') end
call('HDEL', X, ARGV[1])  -- frees memory: where the piece was here, nothing is refused from now on
call('HINCRBY', T, 'pieces', 1)
local files, bytes, dead = 0, 0, {}

local function folder(k) return piece:sub(k * 16 + 3, k * 16 + 18) end
local function chunk_of(v) return v:sub(49, 64) end
local function place_of(v) return (take('<I4', v, 37)) end
local function extents_of(v) return (take('<I4', v, 41)) end
local function stamp_of(v)
  if #v == 64 then return v:sub(49, 64) .. v:sub(37, 40):reverse() end
  return v:sub(65, 84)
end

local function hole(chunk, place)
  local at = place % 1024
  local field, byte = chunk .. pack('>I4', math.floor(place / 1024)), math.floor(at / 8) + 1
  local map, bit = call('HGET', H, field) or string.rep('\\0', 128), 2 ^ (at % 8)
  local value = map:byte(byte)
  if math.floor(value / bit) % 2 == 0 then
    call('HSET', H, field, map:sub(1, byte - 1) .. string.char(value + bit) .. map:sub(byte + 1))
  end
end

local function add(k, v, sign)
  local kind = v:byte(35)
  if kind == 0 then
    files, bytes = files + sign, bytes + sign * take('<I8', v)
  elseif kind == 3 then
    dead[k] = (dead[k] or 0) + sign
  end
end

local function replace(k, name, old, v)
  if old then
    add(k, old, -1)
    if extents_of(old) > 1 then
      for at = 85, #old, 64 do hole(old:sub(at, at + 15), (take('<I4', old, at + 52))) end
    else
      hole(chunk_of(old), place_of(old))
    end
  end
  call('HSET', KEYS[9 + 2 * k], name, v)
  add(k, v, 1)
end

-- Incomplete versions of a path: their stamps and how many extents of each are there
local function drop_part(k, name, stamp, number, is_hole)
  local field = folder(k) .. stamp .. pack('>I4', number) .. name
  local v = call('HGET', P, field)
  if not v then return 0 end
  if is_hole then hole(chunk_of(v), place_of(v)) end
  call('HDEL', P, field)
  return 1
end

local function write_waiting(k, name, waiting)
  if waiting == '' then
    call('HDEL', Q, folder(k) .. name)
  else
    call('HSET', Q, folder(k) .. name, waiting)
  end
end

local function drop_older(k, name, stamp)
  local waiting, left = call('HGET', Q, folder(k) .. name), {}
  if not waiting then return end
  for at = 1, #waiting, 24 do
    local version = waiting:sub(at, at + 19)
    if less(version, stamp) then
      local missing, number = (take('>I4', waiting, at + 20)), 0  -- extents are at most 2^20
      while missing > 0 and number < 1048576 do
        missing = missing - drop_part(k, name, version, number, true)
        number = number + 1
      end
    else
      left[#left + 1] = waiting:sub(at, at + 23)
    end
  end
  write_waiting(k, name, table.concat(left))
end

local function whole(k, name, v, moved)
  local old, stamp, wins = call('HGET', KEYS[9 + 2 * k], name), stamp_of(v), not moved
  if old then
    local standing = stamp_of(old)
    if stamp == standing then
      wins = less(chunk_of(old), chunk_of(v))
    else
      wins = wins and less(standing, stamp)
    end
  end
  if wins then replace(k, name, old, v) else hole(chunk_of(v), place_of(v)) end
  if not moved then drop_older(k, name, stamp) end
end

local function swap(k, name, old, v)
  local number = (take('<I4', v, 85 + 48))
  local at = 85 + 64 * number
  if extents_of(old) <= 1 or at > #old or not less(old:sub(at, at + 15), chunk_of(v)) then
    return hole(chunk_of(v), place_of(v))
  end
  hole(old:sub(at, at + 15), (take('<I4', old, at + 52)))
  local front = number == 0 and v or old
  call('HSET', KEYS[9 + 2 * k], name,
    front:sub(1, 84) .. old:sub(85, at - 1) .. v:sub(85, 148) .. old:sub(at + 64))
end

local function complete(k, name, old, stamp, extents)
  local parts, tail = {}, {}
  for number = 0, extents - 1 do
    local v = call('HGET', P, folder(k) .. stamp .. pack('>I4', number) .. name)
    if not v then return end
    parts[1] = parts[1] or v
    tail[#tail + 1] = v:sub(85, 148)
  end
  replace(k, name, old, parts[1]:sub(1, 84) .. table.concat(tail))
  for number = 0, extents - 1 do drop_part(k, name, stamp, number, false) end
  local waiting, left = call('HGET', Q, folder(k) .. name), {}
  for at = 1, #waiting, 24 do
    if waiting:sub(at, at + 19) ~= stamp then left[#left + 1] = waiting:sub(at, at + 23) end
  end
  write_waiting(k, name, table.concat(left))
  drop_older(k, name, stamp)
end

local function part(k, name, v, moved)
  local old, stamp = call('HGET', KEYS[9 + 2 * k], name), v:sub(65, 84)
  if old then
    local standing = stamp_of(old)
    if stamp == standing then return swap(k, name, old, v) end
    if less(stamp, standing) then return hole(chunk_of(v), place_of(v)) end
  end
  local field = folder(k) .. stamp .. v:sub(133, 136):reverse() .. name
  local known = call('HGET', P, field)
  if (not known and moved) or (known and less(chunk_of(v), chunk_of(known))) then
    return hole(chunk_of(v), place_of(v))
  end
  call('HSET', P, field, v)
  if known then return hole(chunk_of(known), place_of(known)) end
  local waiting, there = call('HGET', Q, folder(k) .. name) or '', 1
  for at = 1, #waiting, 24 do
    if waiting:sub(at, at + 19) == stamp then
      there = take('>I4', waiting, at + 20) + 1
      waiting = waiting:sub(1, at - 1) .. waiting:sub(at + 24)
      break
    end
  end
  write_waiting(k, name, waiting .. stamp .. pack('>I4', there))
  if there >= extents_of(v) then complete(k, name, old, stamp, extents_of(v)) end
end

local function many(k, at)
  local rows, new_files, new_dead, new_bytes, next_at = take('<I2I4I4I8', piece, at)
  local pairs_of = {take(string.rep('Bc0c64', rows), piece, next_at)}
  local key, clear = KEYS[9 + 2 * k], call('EXISTS', Q) == 0
  if clear and call('EXISTS', key) == 1 then
    local names = {}
    for i = 1, rows do names[i] = pairs_of[2 * i - 1] end
    for _, there in ipairs(call('HMGET', key, unpack(names))) do
      if there then clear = false break end
    end
  end
  if clear then
    call('HSET', key, unpack(pairs_of, 1, 2 * rows))
    files, bytes = files + new_files, bytes + new_bytes
    if new_dead > 0 then dead[k] = (dead[k] or 0) + new_dead end
  else
    for i = 1, rows do whole(k, pairs_of[2 * i - 1], pairs_of[2 * i], false) end
  end
  return pairs_of[2 * rows + 1]
end

local at = 3 + 16 * count
while true do
  local step, k, next_at = take('<c1I2', piece, at)
  local parent, name, moved, v
  if step == 'F' then
    parent, name, at = take('<c16Bc0', piece, next_at)
    call('HSET', F, folder(k), parent .. name)
  elseif step == 'S' then
    name, at = take('<Bc0', piece, next_at)
    call('SADD', KEYS[10 + 2 * k], name)
  elseif step == 'N' then
    at = many(k, next_at)
  elseif step == 'G' then
    moved, name, v, at = take('<BBc0I4c0', piece, next_at)
    local place = extents_of(v) > 1 and part or whole
    place(k, name, v, moved == 1)
  elseif step == 'H' then
    parent, v, at = take('<c16I4', piece, next_at)
    hole(parent, v)
  else
    call('HSET', N, ARGV[2], piece:sub(next_at))
    break
  end
end
for k, more in pairs(dead) do call('HINCRBY', D, folder(k), string.format('%.0f', more)) end
call('HINCRBY', T, 'files', string.format('%.0f', files))
call('HINCRBY', T, 'bytes', string.format('%.0f', bytes))
return call('HMGET', T, 'pieces', 'files', 'bytes')
"""
)

# schema marker chunks unapplied begun holds |
# schema generation transaction plan, clock in us and s, longest hold,
# (chunk, what is added to the digest in place of taking its own away)...
FORGET = _script(
    _HEAD
    + """
local marker = redis.call('HMGET', KEYS[2], 'generation', 'version', 'digest', 'newest')
if not marker[1] then return {'none'} end
if marker[1] ~= ARGV[2] then return {'moved'} end
local begun = redis.call('HGET', KEYS[5], ARGV[3])
if not begun or begun:byte(1) ~= 98 then return {'moved'} end
for i = 8, #ARGV, 2 do
  if ARGV[i] == marker[4] or redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
    return {'moved'}
  end
end
local now, longest = tonumber(ARGV[6]), tonumber(ARGV[7])
for _, until_text in ipairs(redis.call('HVALS', KEYS[6])) do
  local left = tonumber(until_text) - now
  if left >= 0 and left <= longest then return {'held'} end
end
local version = math.max(tonumber(marker[2]) + 1, tonumber(ARGV[5]))
version = string.format('%.0f', version)
local digest, chunks = {marker[3]:byte(1, 16)}, 0
redis.call('HSET', KEYS[2], 'version', version)
for i = 8, #ARGV, 2 do
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

# As APPLY | field in x, field in n. The piece: count of folders (u16), so many folders (16), how
# many fields of `h` the chunk has here (u32), then tombstones to drop: position of the folder
# (u16), length of the name (u8), name, length of the entry (u32), entry.
UNAPPLY = _script(
    """
local X, N, T, H, D = unpack(KEYS, 1, 5)
local call, take = redis.call, struct.unpack
local piece = call('HGET', X, ARGV[1])
if not piece then return 0 end
local count = (take('<I2', piece))
if #KEYS ~= 8 + 2 * count then return redis.error_reply('ERR a piece of other folders') end
call('HDEL', X, ARGV[1])
call('HDEL', N, ARGV[2])
local blocks, at = take('<I4', piece, 3 + 16 * count)
for block = 0, blocks - 1 do
  call('HDEL', H, ARGV[2]:sub(1, 16) .. struct.pack('>I4', block))
end
while at <= #piece do
  local k, name, entry, next_at = take('<I2Bc0I4c0', piece, at)
  at = next_at
  if call('HGET', KEYS[9 + 2 * k], name) == entry then
    call('HDEL', KEYS[9 + 2 * k], name)
    call('HINCRBY', D, piece:sub(k * 16 + 3, k * 16 + 18), -1)
  end
end
return 1
"""
)

ALL = (
    LOOK, CREATE, DROP, BEGIN, COMMIT, APPLIED, HOLD, ABANDON,
    BUILD, CONDEMN, SWITCH, APPLY, SET_USERS, FORGET, UNAPPLY,
)  # fmt: skip

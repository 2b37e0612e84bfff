"""Lua scripts that run inside Redis on one bucket.

`APPLY` folds one piece of a commit into the entries (FORMAT.md, section 5). `UNAPPLY` removes the
remaining tombstones and holes of an empty chunk. `keys.py` explains buckets, pieces and the letters
of keys. Each script is atomic. The comment above it lists its keys, all in one slot, and after a
bar its arguments. `head_scripts.py` has the rules for scripts.
"""

from hashlib import sha1
from typing import NamedTuple


class LoadedScript(NamedTuple):
    """Redis knows a script by `sha`."""

    source: bytes
    sha: bytes


SCRIPTS: list[LoadedScript] = []
"""A Redis that lacks one of the scripts is sent all."""


def script(source: str) -> LoadedScript:
    packed = source.encode()
    made = LoadedScript(packed, sha1(packed, usedforsecurity=False).hexdigest().encode())
    SCRIPTS.append(made)
    return made


LESS = """
local function less(a, b)
  for i = 1, #a do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return false
end
"""

# x n t h d f p q, (e s) of each folder | field in x, field in n, [the piece, if not in x]
# Returns the bucket's counts (pieces, files, bytes), or false if there is no such piece.
# Numbers in a piece are little-endian. A piece is: count of folders (u16), the folders (16 each),
# then steps, each with the position of its folder (u16):
#   F parent (16) name        the folder's parent and name, for the index
#   S name                    the name of a subfolder
#   N count (u16), files, tombstones (u32), bytes (u64), then `count` times (name, entry of 64):
#     entries of one extent, not by purge, no name twice; files, tombstones and bytes are their sums
#   G by purge (u8), name, length of the entry (u32), entry: any other entry
#   H chunk (16), place (u32): a hole, since no entry has this place; ignore the folder
# A name is its length (u8) and its bytes. The last step, U, has the paths for `n`.
APPLY = script(
    LESS
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
call('HDEL', X, ARGV[1])  -- frees memory, so Redis does not refuse the writes that follow
call('HINCRBY', T, 'pieces', 1)
local files, bytes, dead = 0, 0, {}

-- Below, k is the position of a folder in the piece, and v a packed entry (`keys.py`): the record
-- (size at byte 1, kind 35, place 37, count of extents 41), then the chunk (49), the stamp (65) and
-- the extents (85), 64 bytes each, with chunk at 1, number at 49 and place at 53
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

local function count_entry(k, v, sign)
  local kind = v:byte(35)
  if kind == 0 then
    files, bytes = files + sign, bytes + sign * take('<I8', v)
  elseif kind == 3 then
    dead[k] = (dead[k] or 0) + sign
  end
end

local function replace(k, name, old, v)
  if old then
    count_entry(k, old, -1)
    if extents_of(old) > 1 then
      for at = 85, #old, 64 do hole(old:sub(at, at + 15), (take('<I4', old, at + 52))) end
    else
      hole(chunk_of(old), place_of(old))
    end
  end
  call('HSET', KEYS[9 + 2 * k], name, v)
  count_entry(k, v, 1)
end

-- Extents of files that are not complete wait in `P`. `Q` has for each such file its stamp, how
-- many of its extents wait, and the number of the one that came last; `P` has with each extent the
-- number of the previous one. So the extents form a list, and nothing else is read.
local NONE = 4294967295

local function drop_part(k, name, stamp, number, is_hole)
  local field = folder(k) .. stamp .. pack('>I4', number) .. name
  local v = call('HGET', P, field)
  if not v then return NONE end
  local entry = v:sub(5)
  if is_hole then hole(chunk_of(entry), place_of(entry)) end
  call('HDEL', P, field)
  return (take('>I4', v))
end

local function drop_parts(k, name, stamp, number, is_hole)
  while number ~= NONE do number = drop_part(k, name, stamp, number, is_hole) end
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
  for at = 1, #waiting, 28 do
    local version = waiting:sub(at, at + 19)
    if less(version, stamp) then
      drop_parts(k, name, version, (take('>I4', waiting, at + 24)), true)
    else
      left[#left + 1] = waiting:sub(at, at + 27)
    end
  end
  write_waiting(k, name, table.concat(left))
end

-- Fold an entry of one extent
local function fold_entry(k, name, v, by_purge)
  local old, stamp, wins = call('HGET', KEYS[9 + 2 * k], name), stamp_of(v), not by_purge
  if old then
    local old_stamp = stamp_of(old)
    if stamp == old_stamp then
      wins = less(chunk_of(old), chunk_of(v))
    else
      wins = wins and less(old_stamp, stamp)
    end
  end
  if wins then replace(k, name, old, v) else hole(chunk_of(v), place_of(v)) end
  if not by_purge then drop_older(k, name, stamp) end
end

-- Fold another copy of an extent of `old`: that in the chunk with the greater ID counts
local function swap_extent(k, name, old, v)
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

-- If no extent of a file is missing any more, make the file the path's entry
local function complete(k, name, old, stamp, extents, last)
  local parts, tail = {}, {}
  for number = 0, extents - 1 do
    local v = call('HGET', P, folder(k) .. stamp .. pack('>I4', number) .. name)
    if not v then return end
    parts[1] = parts[1] or v
    tail[#tail + 1] = v:sub(89, 152)
  end
  replace(k, name, old, parts[1]:sub(5, 88) .. table.concat(tail))
  drop_parts(k, name, stamp, last, false)
  local waiting, left = call('HGET', Q, folder(k) .. name), {}
  for at = 1, #waiting, 28 do
    if waiting:sub(at, at + 19) ~= stamp then left[#left + 1] = waiting:sub(at, at + 27) end
  end
  write_waiting(k, name, table.concat(left))
  drop_older(k, name, stamp)
end

local function fold_extent(k, name, v, by_purge)
  local old, stamp = call('HGET', KEYS[9 + 2 * k], name), v:sub(65, 84)
  if old then
    local old_stamp = stamp_of(old)
    if stamp == old_stamp then return swap_extent(k, name, old, v) end
    if less(stamp, old_stamp) then return hole(chunk_of(v), place_of(v)) end
  end
  local number = v:sub(133, 136):reverse()
  local field = folder(k) .. stamp .. number .. name
  local packed = call('HGET', P, field)
  local known = packed and packed:sub(5)
  if (not known and by_purge) or (known and less(chunk_of(v), chunk_of(known))) then
    return hole(chunk_of(v), place_of(v))
  end
  if known then
    call('HSET', P, field, packed:sub(1, 4) .. v)
    return hole(chunk_of(known), place_of(known))
  end
  local waiting, present, previous = call('HGET', Q, folder(k) .. name) or '', 1, pack('>I4', NONE)
  for at = 1, #waiting, 28 do
    if waiting:sub(at, at + 19) == stamp then
      present, previous = take('>I4', waiting, at + 20) + 1, waiting:sub(at + 24, at + 27)
      waiting = waiting:sub(1, at - 1) .. waiting:sub(at + 28)
      break
    end
  end
  call('HSET', P, field, previous .. v)
  write_waiting(k, name, waiting .. stamp .. pack('>I4', present) .. number)
  if present >= extents_of(v) then
    complete(k, name, old, stamp, extents_of(v), (take('>I4', number)))
  end
end

-- Fold the entries of a step N
local function fold_plain(k, at)
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
    for i = 1, rows do fold_entry(k, pairs_of[2 * i - 1], pairs_of[2 * i], false) end
  end
  return pairs_of[2 * rows + 1]
end

local at = 3 + 16 * count
while true do
  local step, k, next_at = take('<c1I2', piece, at)
  local parent, name, by_purge, v
  if step == 'F' then
    parent, name, at = take('<c16Bc0', piece, next_at)
    call('HSET', F, folder(k), parent .. name)
  elseif step == 'S' then
    name, at = take('<Bc0', piece, next_at)
    call('SADD', KEYS[10 + 2 * k], name)
  elseif step == 'N' then
    at = fold_plain(k, next_at)
  elseif step == 'G' then
    by_purge, name, v, at = take('<BBc0I4c0', piece, next_at)
    local fold = extents_of(v) > 1 and fold_extent or fold_entry
    fold(k, name, v, by_purge == 1)
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

# An HSET that succeeds even if the memory is full (`head_scripts.py`)
STAGE = script(
    """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
)

# Writes a key even if the memory is full (`RedisLink.wait_durable`)
NOTE_SYNC = script(
    """
redis.call('HDEL', KEYS[1], 'sync')
redis.call('HSET', KEYS[1], 'sync', 1)
return 1
"""
)

# The keys of APPLY | field in x, field in n
# The piece: count of folders (u16), the folders (16 each), the number of fields of `h` that the
# chunk has in this bucket (u32), then the tombstones to remove: position of the folder (u16),
# length of the name (u8), name, length of the entry (u32), entry. A tombstone is removed if it is
# still the entry.
UNAPPLY = script(
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

# x | field in x
# Returns the piece up to the end of its list of folders
READ_PIECE_FOLDERS = script(
    """
local piece = redis.call('HGET', KEYS[1], ARGV[1])
if not piece or #piece < 2 then return piece end
return piece:sub(1, 2 + 16 * struct.unpack('<I2', piece))
"""
)

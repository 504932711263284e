-- Delete from the front of the stream what every group is past: first pending or last delivered, whichever is older.
-- KEYS 1 lease (string), 2 stream (stream)
-- ARGV 1 instance id, 2 most entries in one step
-- Returns how many were deleted in whole nodes: above 0 there may be more; -1 when the lease is not ours.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[2])
if groups.err or #groups == 0 then return 0 end

local function less(a, b)
  if #a[1] ~= #b[1] then return #a[1] < #b[1] end
  if a[1] ~= b[1] then return a[1] < b[1] end
  if #a[2] ~= #b[2] then return #a[2] < #b[2] end
  return a[2] < b[2]
end

local oldest
for _, group in ipairs(groups) do
  local ms, seq = string.match(group[8], '(%d+)-(%d+)')
  local id = {ms, string.format('%.0f', tonumber(seq) + 1)}
  local pending = redis.call('XPENDING', KEYS[2], group[2])
  if pending[1] > 0 then
    ms, seq = string.match(pending[2], '(%d+)-(%d+)')
    if less({ms, seq}, id) then id = {ms, seq} end
  end
  if not oldest or less(id, oldest) then oldest = id end
end
local least = oldest[1] .. '-' .. oldest[2]
local done = redis.call('XTRIM', KEYS[2], 'MINID', '~', least, 'LIMIT', ARGV[2])
if done > 0 then return done end
redis.call('XTRIM', KEYS[2], 'MINID', least)  -- no whole node is left, so this is short
return 0

-- Delete entries by hand (queue.delete, purge): from the stream and from every group's pending list; locks go with them.
-- uses: unlock
-- KEYS 1 stream (stream), 2.. locks of the unique ones (string)
-- ARGV per entry: entry id, index in KEYS of its lock or '0', token
-- Returns how many were there.
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then groups = {} end
local total = 0
for i = 1, #ARGV, 3 do
  local id, lock = ARGV[i], tonumber(ARGV[i + 1])
  for _, group in ipairs(groups) do redis.call('XACK', KEYS[1], group[2], id) end
  local deleted = redis.call('XDEL', KEYS[1], id)
  if deleted == 1 and lock > 0 then release_lock(KEYS[lock], ARGV[i + 2]) end
  total = total + deleted
end
return total

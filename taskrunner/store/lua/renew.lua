-- Renew what this process holds: idle time back to 0, the delivery count untouched, and never stolen back.
-- uses: holder, unlock
-- KEYS 1 stream (stream), 2.. locks of the unique ones (string)
-- ARGV 1 group, then per delivery: entry id, consumer, delivery count, index in KEYS of its lock or '0', token,
--   ms the lock must live
-- Returns per delivery: 1 renewed, 0 held by another, -1 pending for nobody, -2 still ours but its body is gone
--   (not renewed: before Redis 7.0 XCLAIM JUSTID would keep such a one for ever).
local stream, group = KEYS[1], ARGV[1]
local result = {}
for i = 2, #ARGV, 6 do
  local id, consumer, count, lock = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local owner, _, deliveries = holder(stream, group, id)
  local status = 0
  if not owner then
    status = -1
  elseif owner == consumer and deliveries == count then
    if redis.call('XRANGE', stream, id, id)[1] then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
      if lock > 0 then extend_lock(KEYS[lock], ARGV[i + 4], ARGV[i + 5]) end
      status = 1
    else
      status = -2
    end
  end
  result[#result + 1] = status
end
return result

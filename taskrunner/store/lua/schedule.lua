-- Dispatch a message for later, by this server's clock; what is due already goes to the stream at once.
-- KEYS 1 stream (stream), 2 delayed set (zset), 3 lock, where unique (string)
-- ARGV 1 'at' or 'in', 2 unix seconds or seconds from now, 3 body for the stream, 4 and 5 the member before and after its
--   integer `time`, 6 token, 7 ms of unique_for, 8 channel
-- Returns {1, entry id} dispatched at once, {2, due} delayed, {0} when another holds the lock.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local due = tonumber(ARGV[2])
if ARGV[1] == 'in' then due = now + due end
if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return {0} end
if due <= now then
  local id = redis.call('XADD', KEYS[1], '*', 'payload', ARGV[3])
  if KEYS[3] then redis.call('SET', KEYS[3], ARGV[6], 'PX', ARGV[7]) end
  return {1, id}
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local score = string.format('%.6f', due)
redis.call('ZADD', KEYS[2], score, ARGV[4] .. string.format('%.0f', math.ceil(due)) .. ARGV[5])
if KEYS[3] then
  redis.call('SET', KEYS[3], ARGV[6], 'PX', string.format('%.0f', math.ceil((due - now) * 1000) + ARGV[7]))
end
if not first[2] or due < tonumber(first[2]) then redis.pcall('PUBLISH', ARGV[8], 'due') end
return {2, score}

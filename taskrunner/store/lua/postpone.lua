-- Move a delivery to the delayed set: a retry later than reclaim_delay, or a task nobody here knows yet.
-- uses: holder, finish, unlock
-- KEYS 1 stream (stream), 2 delayed set (zset), 3 lock, where unique (string)
-- ARGV 1 group, 2 delete_on_ack, 3 entry id, 4 consumer, 5 delivery count, 6 delay in seconds, 7 and 8 the member before
--   and after its integer `time`, 9 token, 10 ms the lock must live, 11 channel
-- Returns 1 moved, 0 held by another, -1 pending for nobody.
local stream, group, id = KEYS[1], ARGV[1], ARGV[3]
local owner, _, deliveries = holder(stream, group, id)
if not owner then return -1 end
if owner ~= ARGV[4] or deliveries ~= tonumber(ARGV[5]) then return 0 end
local delete = deletes(stream, group, ARGV[2])
local now = redis.call('TIME')
local due = now[1] + now[2] / 1000000 + ARGV[6]
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
redis.call('ZADD', KEYS[2], string.format('%.6f', due), ARGV[7] .. string.format('%.0f', math.ceil(due)) .. ARGV[8])
finish(stream, group, id, delete)
if KEYS[3] then extend_lock(KEYS[3], ARGV[9], ARGV[10]) end
if not first[2] or due < tonumber(first[2]) then redis.pcall('PUBLISH', ARGV[11], 'due') end
return 1

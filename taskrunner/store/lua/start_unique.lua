-- Make sure of a unique message's lock before it runs: renewed, taken again if it lapsed.
-- uses: holder
-- KEYS 1 lock (string), 2 stream (stream)
-- ARGV 1 token, 2 lock TTL in ms, 3 group, 4 entry id, 5 consumer, 6 delivery count
-- Returns 1 ours, 0 another message holds it, -1 the delivery itself is no longer ours: it must not run, nor lock.
local owner, _, deliveries = holder(KEYS[2], ARGV[3], ARGV[4])
if owner ~= ARGV[5] or deliveries ~= tonumber(ARGV[6]) then return -1 end
local value = redis.call('GET', KEYS[1])
if value and value ~= ARGV[1] then return 0 end
if not value then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1

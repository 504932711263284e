-- Make sure of a unique message's lock before it runs: renewed, taken again if it lapsed.
-- KEYS 1 lock (string)
-- ARGV 1 token, 2 lock TTL in ms
-- Returns 1 ours, 0 another message holds it.
local value = redis.call('GET', KEYS[1])
if value and value ~= ARGV[1] then return 0 end
if not value then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1

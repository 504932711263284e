-- Renew a key that is ours (presence, lease). PEXPIRE works when Redis is out of memory, SET does not.
-- KEYS 1 key (string)
-- ARGV 1 our value, 2 TTL in ms
-- Returns 1 renewed, 0 the key is gone, -1 another's value.
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
if value ~= ARGV[1] then return -1 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1

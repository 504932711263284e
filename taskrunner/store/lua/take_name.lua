-- Take a host name for an instance, if nobody lives under it and no reader of it in this group has anything pending.
-- KEYS 1 presence key (string), 2 stream (stream)
-- ARGV 1 instance id, 2 TTL in ms, 3 group, 4 start of its consumers' names
-- Returns 1 taken, 0 somebody lives under it, -1 a dead predecessor's deliveries are not reclaimed yet.
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then  -- taken before, and the reply was lost
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if holder then return 0 end
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[2], ARGV[3])
if not consumers.err then
  for _, consumer in ipairs(consumers) do
    local name, pending = consumer[2], consumer[4]
    local number = string.sub(name, 1, #ARGV[4]) == ARGV[4] and string.match(string.sub(name, #ARGV[4] + 1), '^%d+$')
    if number and number ~= '0' and pending > 0 then return -1 end
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1

-- Dispatch a unique message: its lock and its entry in one step.
-- KEYS 1 stream (stream), 2 lock (string)
-- ARGV 1 body, 2 token, 3 lock TTL in ms
-- Returns the entry id, or 0 when another holds the lock.
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local id = redis.call('XADD', KEYS[1], '*', 'payload', ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return id

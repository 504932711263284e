-- Put a dead letter back on the stream; a unique one takes its lock anew.
-- KEYS 1 dead letters (stream), 2 stream (stream), 3 lock, where unique (string)
-- ARGV 1 letter id, 2 body, 3 token, 4 lock TTL in ms
-- Returns the entry id, 0 when another holds the lock, -1 when the letter is gone.
if not redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1] then return -1 end
if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local id = redis.call('XADD', KEYS[2], '*', 'payload', ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[1])
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
return id

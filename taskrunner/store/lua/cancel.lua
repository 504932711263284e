-- Take a delayed message out of the set; its lock goes with it.
-- uses: unlock
-- KEYS 1 delayed set (zset), 2 lock, where unique (string)
-- ARGV 1 member, 2 token
-- Returns 1 cancelled, 0 no longer there.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
if KEYS[2] then release_lock(KEYS[2], ARGV[2]) end
return 1

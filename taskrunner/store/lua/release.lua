-- Give up a key that is ours (presence, lease, unique lock), and say so on a channel where one is given.
-- KEYS 1 key (string)
-- ARGV 1 our value, 2 channel or '', 3 message
-- Returns 1 deleted, 0 it was not ours.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '' then redis.pcall('PUBLISH', ARGV[2], ARGV[3]) end
return 1

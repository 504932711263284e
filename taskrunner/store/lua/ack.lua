-- Finish deliveries of messages that are not unique, all at once.
-- uses: finish
-- KEYS 1 stream (stream)
-- ARGV 1 group, 2 delete_on_ack ('1' or '0'), 3.. entry ids (at most 500)
-- Returns how many were pending. A late success may finish what another took over: the work is done.
local delete = deletes(KEYS[1], ARGV[1], ARGV[2])
local acked = redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 3))
if delete then redis.call('XDEL', KEYS[1], unpack(ARGV, 3)) end
return acked

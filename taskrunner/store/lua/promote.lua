-- Move due members to the stream: only by the leader, only what is still there, added before it is removed.
-- KEYS 1 lease (string), 2 delayed set (zset), 3 stream (stream), 4 dead letters (stream), 5.. locks (string)
-- ARGV 1 instance id, then per member: member, kind, body, index in KEYS of its lock or '0', token, lock TTL in ms,
--   score to put it off to
--   kind 'run': to the stream. 'take': the same, but its lock is taken here first (a member from Go); where another holds
--   the lock it is put off by its score alone. 'dead': to the dead letters, body = reason, token = most letters kept.
-- Returns {1, {status per member}}: 1 moved, 0 no longer there, 2 put off; {0} when the lease is not ours.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {0} end
local result = {}
for i = 2, #ARGV, 7 do
  local member, kind, body, lock = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local status = 1
  if not redis.call('ZSCORE', KEYS[2], member) then
    status = 0
  elseif kind == 'dead' then
    if ARGV[i + 4] ~= '0' then
      local now = redis.call('TIME')
      redis.call('XADD', KEYS[4], 'MAXLEN', ARGV[i + 4], '*', 'task_name', '', 'message_id', '', 'error_type',
        'InvalidTaskPayloadError', 'error', body, 'traceback', '', 'attempts', '0', 'failed_at',
        string.format('%.6f', now[1] + now[2] / 1000000), 'message', member)
    end
    redis.call('ZREM', KEYS[2], member)
  elseif kind == 'take' and redis.call('EXISTS', KEYS[lock]) == 1 then
    redis.call('ZADD', KEYS[2], 'XX', ARGV[i + 6], member)
    status = 2
  else
    redis.call('XADD', KEYS[3], '*', 'payload', body)
    redis.call('ZREM', KEYS[2], member)
    if kind == 'take' then redis.call('SET', KEYS[lock], ARGV[i + 4], 'PX', ARGV[i + 5]) end
  end
  result[#result + 1] = status
end
return {1, result}

-- Remove a consumer that nothing is pending for: XGROUP DELCONSUMER would drop pending entries with it.
-- KEYS 1 stream (stream), 2 presence key of its host (string)
-- ARGV 1 group, 2 consumer, 3 least idle time in ms, 4 our instance id when the consumer is our own, else ''
-- Returns 1 removed, 0 not (missing, pending, not idle, or its host lives).
local presence = redis.call('GET', KEYS[2])
if presence and presence ~= ARGV[4] then return 0 end
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return 0 end
for _, consumer in ipairs(consumers) do
  if consumer[2] == ARGV[2] then
    if consumer[4] > 0 or consumer[6] < tonumber(ARGV[3]) then return 0 end
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
    return 1
  end
end
return 0

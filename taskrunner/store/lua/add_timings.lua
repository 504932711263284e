-- Add run times, each task's sum and count together or not at all.
-- KEYS 1 metrics (hash)
-- ARGV per task: name, ms, runs
-- Returns the names that were refused (a field of theirs is no integer).
local refused = {}
for i = 1, #ARGV, 3 do
  local sum = redis.call('HGET', KEYS[1], ARGV[i] .. '_sum')
  local count = redis.call('HGET', KEYS[1], ARGV[i] .. '_count')
  if (sum and not string.match(sum, '^-?%d+$')) or (count and not string.match(count, '^-?%d+$')) then
    refused[#refused + 1] = ARGV[i]
  else
    redis.call('HINCRBY', KEYS[1], ARGV[i] .. '_sum', ARGV[i + 1])
    redis.call('HINCRBY', KEYS[1], ARGV[i] .. '_count', ARGV[i + 2])
  end
end
return refused

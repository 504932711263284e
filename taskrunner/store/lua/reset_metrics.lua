-- Set the summed timings to 0 in one step: a sample counts before or after it, never half.
-- KEYS 1 lease (string), 2 metrics (hash)
-- ARGV 1 instance id
-- Returns 1, or 0 when the lease is not ours.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  redis.call('HSET', KEYS[2], field, 0)
end
return 1

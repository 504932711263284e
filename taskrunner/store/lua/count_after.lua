-- Count the entries behind an id, a bounded number in one step; their bodies stay here.
-- KEYS 1 stream (stream)
-- ARGV 1 entry id, 2 most entries
-- Returns {how many, the id of the last one counted}.
local last, total, most = ARGV[1], 0, tonumber(ARGV[2])
while total < most do
  local from = '(' .. last
  local rows = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', math.min(20, most - total))
  if #rows == 0 then break end
  total = total + #rows
  last = rows[#rows][1]
end
return {total, last}

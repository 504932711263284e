-- Read the members that are due, oldest first, within bounds.
-- KEYS 1 delayed set (zset)
-- ARGV 1 most members, 2 most bytes (at least one member is returned)
-- Returns {now as text, score of the next member that stays or '', member, score, member, score, …}.
local time = redis.call('TIME')
local now = string.format('%.6f', time[1] + time[2] / 1000000)
local result, bytes, offset = {now, ''}, 0, 0
local most = tonumber(ARGV[1])
while offset < most do
  local step = math.min(4, most - offset)
  local page = redis.call('ZRANGE', KEYS[1], offset, offset + step - 1, 'WITHSCORES')
  for i = 1, #page, 2 do
    if tonumber(page[i + 1]) > tonumber(now) or (offset > 0 and bytes >= tonumber(ARGV[2])) then
      result[2] = page[i + 1]
      return result
    end
    result[#result + 1] = page[i]
    result[#result + 1] = page[i + 1]
    bytes = bytes + #page[i]
    offset = offset + 1
  end
  if #page < 2 * step then return result end
end
local after = redis.call('ZRANGE', KEYS[1], offset, offset, 'WITHSCORES')
result[2] = after[2] or ''
return result

-- Take over deliveries whose holder went silent, and parked ones that are due. Raises the delivery count.
-- uses: holder
-- KEYS 1 stream (stream)
-- ARGV 1 group, 2 the claiming consumer, 3 least idle time in ms, 4 bytes after which no more is taken, 5.. entry ids
-- Returns per id a row {id, delivery count, former consumer, fields}; {id, 0, '', {}} where the body was gone: it is acked;
--   {id, -1, consumer, idle ms} where it isn't idle long enough, {id, -2} where it is pending for nobody.
local stream, group, consumer, least, room = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local result = {}
for i = 5, #ARGV do
  if room <= 0 then break end
  local id = ARGV[i]
  local owner, idle, deliveries = holder(stream, group, id)
  if not owner then
    result[#result + 1] = {id, -2}
  elseif idle < least then
    result[#result + 1] = {id, -1, owner, idle}
  else
    local entry = redis.call('XCLAIM', stream, group, consumer, least, id)[1]
    if entry and entry[2] then
      for _, field in ipairs(entry[2]) do room = room - #field end
      result[#result + 1] = {id, deliveries + 1, owner, entry[2]}
    else
      redis.call('XACK', stream, group, id)
      result[#result + 1] = {id, 0, owner, {}}
    end
  end
end
return result

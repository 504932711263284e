-- Give deliveries to the parking consumer: a short retry, or one handed back unstarted. The new owner makes every late
-- step of the old delivery fail its own check.
-- uses: holder, unlock
-- KEYS 1 stream (stream), 2 presence key (string), 3.. locks of the unique ones (string)
-- ARGV 1 group, 2 parking consumer, 3 presence value or '' (checked only where given: the unseen deliveries of a
--   consumer may be parked only by the process that owns its name)
--   then per delivery: entry id, consumer, delivery count, idle ms, new delivery count or '' (keep),
--   index in KEYS of its lock or '0', token, ms the lock must live
-- Returns per delivery: 1 parked (or parked already: the first reply was lost), 0 held by another, -1 pending for nobody,
--   -2 not looked at: the presence key is gone, -3 it holds another's id.
local stream, group, parking = KEYS[1], ARGV[1], ARGV[2]
local result = {}
local refused
if ARGV[3] ~= '' then
  local value = redis.call('GET', KEYS[2])
  if not value then refused = -2 elseif value ~= ARGV[3] then refused = -3 end
end
for i = 4, #ARGV, 8 do
  local id, consumer, count, idle, recount = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local lock = tonumber(ARGV[i + 5])
  local owner, _, deliveries = holder(stream, group, id)
  local status = 0
  if refused then
    status = refused
  elseif not owner then
    status = -1
  elseif owner == consumer and deliveries == count then
    if recount == '' then
      redis.call('XCLAIM', stream, group, parking, 0, id, 'IDLE', idle, 'JUSTID')
    else
      redis.call('XCLAIM', stream, group, parking, 0, id, 'IDLE', idle, 'RETRYCOUNT', recount, 'JUSTID')
    end
    if lock > 0 then extend_lock(KEYS[lock], ARGV[i + 6], ARGV[i + 7]) end
    status = 1
  elseif owner == parking and deliveries == (tonumber(recount) or count) then
    status = 1
  end
  result[#result + 1] = status
end
return result

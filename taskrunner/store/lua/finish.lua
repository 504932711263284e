-- Part: end an entry.
-- deletes(stream, wanted) -> whether a finished entry may be deleted: wanted by the queue (delete_on_ack), and no second
-- group still has to get it. finish(stream, group, id, delete) -> XACK's answer, 1 where it was pending.
local function deletes(stream, wanted)
  if wanted ~= '1' then return false end
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  return groups.err ~= nil or #groups <= 1
end

local function finish(stream, group, id, delete)
  local acked = redis.call('XACK', stream, group, id)
  if delete then redis.call('XDEL', stream, id) end
  return acked
end

-- Part: end an entry.
-- deletes(stream, group, wanted) -> whether a finished entry may be deleted: wanted by the queue (delete_on_ack), and no
-- other group still has to get it. What the server doesn't let us know counts as "another has".
-- finish(stream, group, id, delete) -> XACK's answer, 1 where it was pending.
local function deletes(stream, group, wanted)
  if wanted ~= '1' then return false end
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return string.find(groups.err, 'no such key', 1, true) ~= nil end
  return #groups == 0 or (#groups == 1 and groups[1][2] == group)
end

local function finish(stream, group, id, delete)
  local acked = redis.call('XACK', stream, group, id)
  if delete then redis.call('XDEL', stream, id) end
  return acked
end

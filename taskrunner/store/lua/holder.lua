-- Part: who holds a delivery.
-- holder(stream, group, id) -> consumer, idle ms, delivery count; nil when it is pending for nobody (finished, or the
-- group or the stream is gone).
local function holder(stream, group, id)
  local rows = redis.pcall('XPENDING', stream, group, id, id, 1)
  if rows.err then
    if string.find(rows.err, 'NOGROUP', 1, true) then return nil end
    rows = redis.call('XPENDING', stream, group, id, id, 1)
  end
  if not rows[1] then return nil end
  return rows[1][2], rows[1][3], rows[1][4]
end

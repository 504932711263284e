-- Finish deliveries of unique messages, one by one: a lock is released only where this very step ended the message.
-- uses: finish, unlock
-- KEYS 1 stream (stream), 2.. lock of each id (string)
-- ARGV 1 group, 2 delete_on_ack, then per id: entry id, token
-- Returns how many were pending.
local delete, total = deletes(KEYS[1], ARGV[1], ARGV[2]), 0
for i = 2, #KEYS do
  local id, token = ARGV[2 * i - 1], ARGV[2 * i]
  local acked = finish(KEYS[1], ARGV[1], id, delete)
  if acked == 1 then release_lock(KEYS[i], token) end
  total = total + acked
end
return total

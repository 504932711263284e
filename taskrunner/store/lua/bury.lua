-- Move a message that failed for good to the dead letters; its body is copied here, so its text stays as it is and
-- never travels.
-- uses: holder, finish, unlock
-- KEYS 1 stream (stream), 2 dead letters (stream), 3 lock, where unique (string)
-- ARGV 1 group, 2 delete_on_ack, 3 entry id, 4 consumer, 5 delivery count, 6 most letters kept (0: none), 7 token,
--   8 '1' when the body must stay out (too large for the server), 9.. fields of the letter
-- Returns 1 buried, 0 held by another, -1 pending for nobody, -2 its body was gone (acked).
local stream, group, id = KEYS[1], ARGV[1], ARGV[3]
local owner, _, deliveries = holder(stream, group, id)
if not owner then return -1 end
if owner ~= ARGV[4] or deliveries ~= tonumber(ARGV[5]) then return 0 end
local delete = deletes(stream, group, ARGV[2])
local entry = redis.call('XRANGE', stream, id, id)[1]
local status = -2
if entry then
  local body = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'payload' then body = entry[2][i + 1] end
  end
  if ARGV[8] == '1' then body = '' end
  if ARGV[6] ~= '0' then
    local letter = {unpack(ARGV, 9)}
    letter[#letter + 1] = 'message'
    letter[#letter + 1] = body
    redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[6], '*', unpack(letter))
  end
  status = 1
end
finish(stream, group, id, delete)
if KEYS[3] then release_lock(KEYS[3], ARGV[7]) end
return status

-- Part: a unique lock is touched only while it holds the message's own token.
-- extend_lock(key, token, ms): at least ms from now, never shorter than it is. release_lock(key, token).
local function extend_lock(key, token, ms)
  if redis.call('GET', key) == token and redis.call('PTTL', key) < tonumber(ms) then
    redis.call('PEXPIRE', key, ms)
  end
end

local function release_lock(key, token)
  if redis.call('GET', key) == token then redis.call('DEL', key) end
end

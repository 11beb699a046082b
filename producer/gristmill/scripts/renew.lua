-- Renew a worker's leases: of the entries it works on those that are still its own, for one that was silent for
-- too long must not take back what another works on by now.
--
-- KEYS  1     request stream
-- ARGV  1     consumer group
--       2     worker name
--       3     entries under its name at the most
--       4...  entries that it is working on
-- Returns how many were renewed.

local STEP = 1000 -- what Lua passes to a command at a time
local held, own = {}, {}
for i = 4, #ARGV do held[ARGV[i]] = true end
for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])) do
  if held[row[1]] then own[#own + 1] = row[1] end
end
for i = 1, #own, STEP do
  local ids = { unpack(own, i, math.min(i + STEP - 1, #own)) }
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
end
return #own

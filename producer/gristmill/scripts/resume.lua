-- Deliver again entries under a worker's own name; this counts as a delivery of each.
--
-- KEYS  1     request stream
-- ARGV  1     consumer group
--       2     worker name
--       3...  entries
-- Returns for each of them that is still under this name entry ID, fields and deliveries with this one. Entries that
-- somebody has deleted are acknowledged on the way.

local found = {}
for i = 3, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])[1]
  if row then
    local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i])[1]
    if entry then
      found[#found + 1] = { entry[1], entry[2], row[4] + 1 }
    else
      redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    end
  end
end
return found

-- Deliver again the oldest entry under a worker's own name that it is not working on; this counts as a delivery.
--
-- KEYS  1     request stream
-- ARGV  1     consumer group
--       2     worker name
--       3...  entries that it is working on
-- Returns entry ID, fields and deliveries with this one, or nothing. Entries that somebody has deleted are
-- acknowledged on the way.

local busy = {}
for i = 3, #ARGV do busy[ARGV[i]] = true end
while true do
  local rows = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', #ARGV - 1, ARGV[2])
  local deleted = false
  for _, row in ipairs(rows) do
    if not busy[row[1]] then
      local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, row[1])[1]
      if entry then return { entry[1], entry[2], row[4] + 1 } end
      redis.call('XACK', KEYS[1], ARGV[1], row[1])
      deleted = true
    end
  end
  if not deleted then return {} end
end

-- Make entries of a worker whose process is dead one's own, and forget it once it has none. This is no delivery:
-- counts stay as they are.
--
-- KEYS  1  request stream
--       2  processes of the queue's workers
--       3  heartbeat of the dead
-- ARGV  1  consumer group      3  name of the dead
--       2  worker name         4  its process, as it was when it was found dead
--       5  entries to take at the most
-- Returns how many were taken; 0 also if another process has that name by now.

if redis.call('HGET', KEYS[2], ARGV[3]) ~= ARGV[4] then return 0 end
local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[5], ARGV[3])
if rows.err then return 0 end
if #rows == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[3])
  redis.call('HDEL', KEYS[2], ARGV[3])
  redis.call('DEL', KEYS[3])
  return 0
end
local ids = {}
for i, row in ipairs(rows) do ids[i] = row[1] end
ids[#ids + 1] = 'JUSTID'
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
return #rows

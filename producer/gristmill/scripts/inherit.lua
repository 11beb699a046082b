-- Make entries of a worker whose process is dead one's own, and forget it once it has none. This is no delivery:
-- counts stay as they are.
--
-- KEYS  1     processes of the queue's workers
--       2     heartbeat of the dead
--       3...  request streams
-- ARGV  1  consumer group      3  name of the dead
--       2  worker name         4  its process, as it was when it was found dead
--       5  entries to take at the most
-- Returns the number of their stream, 1 to 3, and the entries that were taken, all from this one; nothing also if
-- another process has that name by now.

if redis.call('HGET', KEYS[1], ARGV[3]) ~= ARGV[4] then return {} end
for i = 3, #KEYS do
  local rows = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', ARGV[5], ARGV[3])
  if not rows.err and #rows > 0 then
    local ids = {}
    for j, row in ipairs(rows) do ids[j] = row[1] end
    ids[#ids + 1] = 'JUSTID'
    redis.call('XCLAIM', KEYS[i], ARGV[1], ARGV[2], 0, unpack(ids))
    ids[#ids] = nil
    return { i - 2, ids }
  end
end
for i = 3, #KEYS do redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[3]) end
redis.call('HDEL', KEYS[1], ARGV[3])
redis.call('DEL', KEYS[2])
return {}

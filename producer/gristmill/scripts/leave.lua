-- Sign a worker off: remove its heartbeat, its consumer, and consumers that are long gone.
--
-- KEYS  1  request stream
--       2  heartbeat of the worker
--       3  processes of the queue's workers
-- ARGV  1  consumer group
--       2  worker name
--       3  idle time in ms after which another consumer is gone
-- A consumer with pending entries is never removed: its entries could not be taken over any more.

redis.call('DEL', KEYS[2])
local listed = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if listed.err then return 0 end
for _, pairs in ipairs(listed) do
  local consumer = {}
  for i = 1, #pairs, 2 do consumer[pairs[i]] = pairs[i + 1] end
  if consumer.pending == 0 and (consumer.name == ARGV[2] or consumer.idle > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    redis.call('HDEL', KEYS[3], consumer.name)
  end
end
return 1

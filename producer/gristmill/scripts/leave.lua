-- Sign a worker off: remove its heartbeat, its consumers, and consumers that are long gone.
--
-- KEYS  1     heartbeat of the worker
--       2     processes of the queue's workers
--       3...  request streams
-- ARGV  1  consumer group
--       2  worker name
--       3  idle time in ms after which another consumer is gone
-- A consumer with pending entries is never removed: its entries could not be taken over any more.

redis.call('DEL', KEYS[1])
local gone, busy = {}, {}
for i = 3, #KEYS do
  local listed = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[1])
  for _, pairs in ipairs(listed) do -- none where there is no group
    local consumer = {}
    for j = 1, #pairs, 2 do consumer[pairs[j]] = pairs[j + 1] end
    if consumer.pending > 0 then
      busy[consumer.name] = true
    elseif consumer.name == ARGV[2] or consumer.idle > tonumber(ARGV[3]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], consumer.name)
      gone[#gone + 1] = consumer.name
    end
  end
end
for _, name in ipairs(gone) do
  if not busy[name] then redis.call('HDEL', KEYS[2], name) end
end
return 1

-- Write a worker's heartbeat, and which process it is.
--
-- KEYS  1     heartbeat of the worker
--       2     processes of the queue's workers
-- ARGV  1     seconds that the heartbeat lives without another one
--       2     worker name
--       3     its process, '' = cannot be told
--       4...  fields of the heartbeat: names and values, alternating

redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('EXPIRE', KEYS[1], ARGV[1])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], ARGV[2], ARGV[3]) end
return 1

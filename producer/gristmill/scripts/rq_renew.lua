-- Keep RQ from counting jobs that a worker holds as abandoned.
--
-- KEYS  1     what the worker holds
--       2     RQ's registry of started jobs
-- ARGV  1, 2  the time: in RQ's format, in Unix seconds
--       3     seconds until RQ counts them as abandoned without another renewal
--       4     prefixes of the keys of a job, 5 of an execution, 6 of a job's executions
--       7...  job:execution of each
-- Returns how many were renewed; others are not the worker's any more.

local score = math.floor(tonumber(ARGV[2])) + tonumber(ARGV[3])
local count = 0
for i = 7, #ARGV do
  local entry = ARGV[i]
  local id, execution = string.match(entry, '^(.*):([^:]*)$')
  local job, record, executions = ARGV[4] .. id, ARGV[5] .. entry, ARGV[6] .. id
  if redis.call('HEXISTS', KEYS[1], entry) == 1 and redis.call('EXISTS', job) == 1 then
    redis.call('ZADD', KEYS[2], 'XX', score, entry)
    redis.call('HSET', job, 'last_heartbeat', ARGV[1])
    if redis.call('EXISTS', record) == 1 then redis.call('HSET', record, 'last_heartbeat', ARGV[2]) end
    redis.call('EXPIRE', record, ARGV[3])
    redis.call('ZADD', executions, 'XX', score + 60, execution)
    redis.call('EXPIRE', executions, ARGV[3] + 60)
    count = count + 1
  end
end
return count

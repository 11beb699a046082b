-- Finish jobs that succeeded, as RQ does.
--
-- KEYS  1     what this worker holds
--       2     RQ's registry of started jobs
--       3     RQ's registry of finished jobs
--       4     RQ's record of this worker
--       5     RQ's index of this worker's executions
-- ARGV  1     prefixes of the keys of a job, 2 of a job's results, 3 of an execution, 4 of a job's executions
--       5     the time, in RQ's format
--       6...  per job: ID, execution, its share of the run in seconds, seconds to keep it (-1: for ever), score in the
--             registry, number of fields of the result, fields: names and values, alternating
-- Returns one integer per job: 1 finished; 0 not this worker's any more, deleted or cancelled; 2 others depend
-- on it, so nothing was done.

local codes, finished, worked = {}, 0, 0
local at = 6
while at <= #ARGV do
  local id, execution, seconds, ttl, score = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), ARGV[at + 4]
  local first = at + 6
  at = first + 2 * tonumber(ARGV[at + 5])
  local entry, job = id .. ':' .. execution, ARGV[1] .. id
  local code = 0
  if redis.call('HEXISTS', KEYS[1], entry) == 1 then
    local status = redis.pcall('HGET', job, 'status')
    if type(status) == 'string' and status ~= 'canceled' then
      code = redis.call('EXISTS', job .. ':dependents') == 1 and 2 or 1
    end
    if code ~= 2 then
      redis.call('HDEL', KEYS[1], entry)
      redis.call('ZREM', KEYS[2], entry)
      redis.call('DEL', ARGV[3] .. entry)
      redis.call('ZREM', ARGV[4] .. id, execution)
      redis.call('SREM', KEYS[5], entry)
    end
    if code == 1 then
      local results = ARGV[2] .. id
      redis.call('HSET', job, 'status', 'finished', 'ended_at', ARGV[5], 'last_heartbeat', ARGV[5])
      redis.call('HDEL', job, 'gm_deliveries')
      redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, first, at - 1))
      redis.call('ZADD', KEYS[3], score, id)
      if ttl > 0 then
        redis.call('EXPIRE', job, ttl)
        redis.call('EXPIRE', results, ttl)
        redis.call('EXPIRE', ARGV[1] .. ':' .. id .. ':dependencies', ttl)
      else
        redis.call('PERSIST', results)
      end
      finished = finished + 1
      worked = worked + seconds
    end
  end
  codes[#codes + 1] = code
end
if finished > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('HINCRBY', KEYS[4], 'successful_job_count', finished)
  redis.call('HINCRBYFLOAT', KEYS[4], 'total_working_time', tostring(worked))
end
return codes

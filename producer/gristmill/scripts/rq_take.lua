-- Take jobs off an RQ queue, and mark each of them as started by this worker in the same step.
--
-- KEYS  1     RQ's list of the queue
--       2     jobs that this worker has popped and not yet taken
--       3     what this worker holds: job:execution -> 1
--       4     RQ's registry of started jobs
--       5     RQ's mark that all workers are suspended
--       6     RQ's index of this worker's executions
-- ARGV  1     most jobs to take
--       2     '' = leave alone what was delivered before
--       3     worker name
--       4     beginning of the executions' IDs; a number is added
--       5, 6  the time: in RQ's format, in Unix seconds
--       7     seconds until RQ counts them as abandoned, if they are not renewed
--       8     prefixes of the keys of a job, 9 of an execution, 10 of a job's executions
--       11... fields of the jobs to return, the first of which each job has
-- Returns { 1 } if RQ's workers are suspended; else 0, and per job: ID, execution, deliveries with this one,
-- the fields. A job that was delivered before comes alone. Jobs that are gone or cancelled are left out.

if redis.call('EXISTS', KEYS[5]) == 1 then return { 1 } end
local found = { 0 }
local score = math.floor(tonumber(ARGV[6])) + tonumber(ARGV[7])
for i = 1, tonumber(ARGV[1]) do
  local id, popped = redis.call('LPOP', KEYS[2]), true
  if not id then
    id = redis.call('LPOP', KEYS[1])
    popped = false
  end
  if not id then break end
  local job = ARGV[8] .. id
  local kept = redis.pcall('HMGET', job, 'status', 'gm_deliveries', unpack(ARGV, 11))
  if not kept.err and kept[1] ~= 'canceled' and kept[3] then
    local before = tonumber(kept[2] or 0)
    if before > 0 and (#found > 1 or ARGV[2] == '') then
      redis.call('LPUSH', popped and KEYS[2] or KEYS[1], id)
      break
    end
    local execution = ARGV[4] .. string.format('%08x', i)
    local entry = id .. ':' .. execution
    local record = ARGV[9] .. entry
    redis.call('HSET', KEYS[3], entry, '1')
    redis.call('ZADD', KEYS[4], score, entry)
    redis.call('HSET', job, 'status', 'started', 'started_at', ARGV[5], 'last_heartbeat', ARGV[5],
      'worker_name', ARGV[3])
    redis.call('PERSIST', job)
    redis.call('HSET', record, 'id', execution, 'job_id', id, 'created_at', ARGV[6], 'last_heartbeat', ARGV[6],
      'worker_name', ARGV[3])
    redis.call('EXPIRE', record, ARGV[7])
    redis.call('ZADD', ARGV[10] .. id, score + 60, execution)
    redis.call('EXPIRE', ARGV[10] .. id, ARGV[7] + 60)
    redis.call('SADD', KEYS[6], entry)
    found[#found + 1] = { id, execution, before + 1, unpack(kept, 3, #ARGV - 8) }
    if before > 0 then break end
  end
end
return found

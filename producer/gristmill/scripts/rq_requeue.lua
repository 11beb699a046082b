-- Put jobs that a worker holds back to the front of their RQ queue, in the order in which they were taken.
--
-- KEYS  1     RQ's list of the queue
--       2     jobs that the worker has popped and not yet taken
--       3     what the worker holds
--       4     RQ's registry of started jobs
--       5     RQ's index of the worker's executions
--       6     processes of the queue's workers, 7 the worker's sign of life
--       8     RQ's record of the worker, 9 RQ's workers, 10 RQ's workers of the queue
-- ARGV  1     '1' = count this as a delivery
--       2     prefixes of the keys of a job, 3 of an execution, 4 of a job's executions
--       5     'only' these, 'except' these: and what was popped
--       6     name of a worker that is dead, and to be forgotten; '' = it is alive
--       7     its process, as it was when it was found dead
--       8     '1' = that process is known to be dead, so its sign of life does not matter
--       9...  job:execution of each
-- Returns how many were put back. What is finished, cancelled or deleted is only forgotten.

if ARGV[6] ~= '' then
  if redis.call('HGET', KEYS[6], ARGV[6]) ~= ARGV[7] then return 0 end
  if ARGV[8] ~= '1' and redis.call('EXISTS', KEYS[7]) == 1 then return 0 end
end
local entries, named = {}, {}
for i = 9, #ARGV do
  if ARGV[5] == 'only' then entries[#entries + 1] = ARGV[i] else named[ARGV[i]] = true end
end
local count = 0
if ARGV[5] == 'except' then
  for _, entry in ipairs(redis.call('HKEYS', KEYS[3])) do
    if not named[entry] then entries[#entries + 1] = entry end
  end
  while redis.call('LMOVE', KEYS[2], KEYS[1], 'RIGHT', 'LEFT') do count = count + 1 end
end
local taken = {}  -- executions' IDs grow
for _, entry in ipairs(entries) do taken[#taken + 1] = { string.match(entry, '^(.*):([^:]*)$') } end
table.sort(taken, function(one, other) return one[2] > other[2] end)
for _, pair in ipairs(taken) do
  local id, execution = pair[1], pair[2]
  local entry, job = id .. ':' .. execution, ARGV[2] .. id
  if redis.call('HDEL', KEYS[3], entry) == 1 then
    local running = redis.call('ZREM', KEYS[4], entry) == 1
    redis.call('DEL', ARGV[3] .. entry)
    redis.call('ZREM', ARGV[4] .. id, execution)
    redis.call('SREM', KEYS[5], entry)
    if running and redis.pcall('HGET', job, 'status') == 'started' then
      redis.call('HSET', job, 'status', 'queued')
      if ARGV[1] == '1' then redis.call('HINCRBY', job, 'gm_deliveries', 1) end
      redis.call('LPUSH', KEYS[1], id)
      count = count + 1
    end
  end
end
if ARGV[6] ~= '' then
  redis.call('HDEL', KEYS[6], ARGV[6])
  redis.call('SREM', KEYS[9], KEYS[8])
  redis.call('SREM', KEYS[10], KEYS[8])
  redis.call('DEL', KEYS[5], KEYS[7], KEYS[8])
end
return count

-- Look for workers whose entries may be taken over.
--
-- KEYS  1  request stream
--       2  processes of the queue's workers
-- ARGV  1  consumer group      3  the lease in ms
--       2  worker name         4  where this worker runs: what its process begins with, '' = cannot be told
-- Returns 1 if another worker with entries was silent for a lease, else 0; then name and process of each other
-- worker that runs here.

local found = { 0 }
local listed = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if listed.err then return found end
for _, pairs in ipairs(listed) do
  local consumer = {}
  for i = 1, #pairs, 2 do consumer[pairs[i]] = pairs[i + 1] end
  if consumer.pending > 0 and consumer.idle >= tonumber(ARGV[3]) and consumer.name ~= ARGV[2] then found[1] = 1 end
end
if ARGV[4] == '' then return found end
local processes = redis.call('HGETALL', KEYS[2])
for i = 1, #processes, 2 do
  if processes[i] ~= ARGV[2] and string.sub(processes[i + 1], 1, #ARGV[4]) == ARGV[4] then
    found[#found + 1] = processes[i]
    found[#found + 1] = processes[i + 1]
  end
end
return found

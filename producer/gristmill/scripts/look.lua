-- Look for workers whose entries may be taken over.
--
-- KEYS  1     processes of the queue's workers
--       2...  request streams
-- ARGV  1  consumer group      3  the lease in ms
--       2  worker name         4  where this worker runs: what its process begins with, '' = cannot be told
-- Returns 1 if another worker with entries was silent for a lease, else 0; then name and process of each other
-- worker that runs here.

local found = { 0 }
for i = 2, #KEYS do
  local listed = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[1])
  for _, pairs in ipairs(listed) do -- none where there is no group
    local consumer = {}
    for j = 1, #pairs, 2 do consumer[pairs[j]] = pairs[j + 1] end
    if consumer.pending > 0 and consumer.idle >= tonumber(ARGV[3]) and consumer.name ~= ARGV[2] then found[1] = 1 end
  end
end
if ARGV[4] == '' then return found end
local processes = redis.call('HGETALL', KEYS[1])
for i = 1, #processes, 2 do
  if processes[i] ~= ARGV[2] and string.sub(processes[i + 1], 1, #ARGV[4]) == ARGV[4] then
    found[#found + 1] = processes[i]
    found[#found + 1] = processes[i + 1]
  end
end
return found

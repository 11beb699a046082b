-- Admit requests to a queue: idempotent by request ID, bounded at admission.
--
-- KEYS  1     request stream for these requests
--       2,3   the queue's other request streams, which count for the bound too
--       4     config hash (field max_length overrides the bound)
--       5...  one result key per request
-- ARGV  1     admission bound: entries that the streams may hold (used if the config names none)
--       2     seconds to keep the "pending" mark
--       3...  per request: number of stream fields n, then n field names and values, alternating
-- Returns one integer per request: 1 queued, 0 known already (nothing was done), -1 refused: queue full.

local limit = tonumber(ARGV[1])
local configured = redis.call('HGET', KEYS[4], 'max_length')
if configured and string.find(configured, '^%d+$') then limit = tonumber(configured) end
local room = limit
for i = 1, 3 do room = room - redis.call('XLEN', KEYS[i]) end
local outcome = {}
local at = 3
for i = 5, #KEYS do
  local fields = tonumber(ARGV[at]) * 2
  if redis.call('EXISTS', KEYS[i]) == 1 then
    outcome[i - 4] = 0
  elseif room <= 0 then
    outcome[i - 4] = -1
  else
    redis.call('SET', KEYS[i], 'pending', 'EX', ARGV[2])
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + fields))
    room = room - 1
    outcome[i - 4] = 1
  end
  at = at + 1 + fields
end
return outcome

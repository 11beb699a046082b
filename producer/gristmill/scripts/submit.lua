-- Admit requests to a queue: idempotent by request ID, bounded at admission.
--
-- KEYS  1     request stream
--       2     config hash (field max_length overrides the bound)
--       3...  one result key per request
-- ARGV  1     admission bound: entries that the stream may hold (used if the config names none)
--       2     seconds to keep the "pending" mark
--       3...  per request: number of stream fields n, then n field names and values, alternating
-- Returns one integer per request: 1 queued, 0 known already (nothing was done), -1 refused: queue full.

local limit = tonumber(ARGV[1])
local configured = redis.call('HGET', KEYS[2], 'max_length')
if configured and string.find(configured, '^%d+$') then limit = tonumber(configured) end
local room = limit - redis.call('XLEN', KEYS[1])
local outcome = {}
local at = 3
for i = 3, #KEYS do
  local fields = tonumber(ARGV[at]) * 2
  if redis.call('EXISTS', KEYS[i]) == 1 then
    outcome[i - 2] = 0
  elseif room <= 0 then
    outcome[i - 2] = -1
  else
    redis.call('SET', KEYS[i], 'pending', 'EX', ARGV[2])
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + fields))
    room = room - 1
    outcome[i - 2] = 1
  end
  at = at + 1 + fields
end
return outcome
